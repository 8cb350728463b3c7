import type { RefObject } from "preact";
import { useEffect } from "preact/hooks";

/** An element with it, or within one, has its keys left alone by JupyterLab's shortcuts. */
const SUPPRESS = "data-lm-suppress-shortcuts";

/** What uses keys however it got the focus: what scrolls, what zooms, what is typed in. */
const USES_KEYS = "[tabindex='0'], input, select";

/**
 * Keeps keys that are ours from the notebook, for which `0 0` restarts the kernel and `d d` deletes
 * a cell. Keys on a button are ours if the reader came to it by keyboard: one who clicked Stop goes
 * on with the notebook. Ctrl and Cmd are never ours: Ctrl+S saves the notebook from here too.
 *
 * JupyterLab up to 4.1 hears keys before any element does, later ones and nbclassic after all of
 * them: so the attribute is set before everybody, and what has passed our elements is held back.
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
