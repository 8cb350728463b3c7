import type { RefObject } from "preact";
import { useEffect } from "preact/hooks";

/** JupyterLab's shortcuts ignore keys of an element with it, or within one. */
const SUPPRESS = "data-lm-suppress-shortcuts";

/** Elements that use keys however they got the focus: scrolling, zooming and typing. */
const USES_KEYS = "[tabindex='0'], input, select";

/**
 * Keeps our keys from the notebook, where `0 0` restarts the kernel and `d d` deletes a cell. Keys
 * on a button are ours if it was focused by keyboard: after a click on Stop, keys belong to the
 * notebook. Ctrl and Cmd are never ours: Ctrl+S saves the notebook from here too. JupyterLab up to
 * 4.1 handles keys before any element, later versions and nbclassic after all of them: so the
 * attribute is set first of all, and events that have passed our elements are stopped.
 */
export function useOwnKeys(root: RefObject<HTMLElement>): void {
  useEffect(() => {
    const element = root.current as HTMLElement;
    const ending = new AbortController();
    const { signal } = ending;
    let isByKeyboard = false;
    const isOurs = ({ target, ctrlKey, metaKey }: KeyboardEvent) =>
      target instanceof Element &&
      element.contains(target) &&
      (isByKeyboard || target.matches(USES_KEYS)) &&
      !(ctrlKey || metaKey);
    const focused = ({ target }: FocusEvent) => {
      isByKeyboard = (target as Element).matches(":focus-visible");
    };
    const mark = (event: KeyboardEvent) => element.toggleAttribute(SUPPRESS, isOurs(event));
    const hold = (event: KeyboardEvent) => isOurs(event) && event.stopPropagation();
    element.addEventListener("focusin", focused, { signal });
    window.addEventListener("keydown", mark, { capture: true, signal });
    element.addEventListener("keydown", hold, { signal });
    return () => ending.abort();
  }, [root]);
}
