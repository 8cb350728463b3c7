import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import type { Store } from "../store";
import { readTheme, type Theme, watchTheme } from "../theme";

/** Renders again when the store changed, at most once per animation frame. */
export function useStore(store: Store): number {
  const [, show] = useState(store.version);
  useLayoutEffect(() => {
    show(store.version);
    return store.subscribe(() => show(store.version));
  }, [store]);
  return store.version;
}

/** The notebook's theme at `root`; null until `root` is in the page. */
export function useTheme(root: RefObject<HTMLElement>): Theme | null {
  const [theme, setTheme] = useState<Theme | null>(null);
  useLayoutEffect(() => {
    const element = root.current;
    if (element === null) return;
    const read = () => setTheme(readTheme(element));
    read();
    const end = watchTheme(read);
    // A notebook renders before it inserts the element into the page, where the variables are
    // defined.
    const attached = new ResizeObserver(() => {
      if (!element.isConnected) return;
      attached.disconnect();
      read();
    });
    attached.observe(element);
    return () => {
      attached.disconnect();
      end();
    };
  }, [root]);
  return theme;
}

/** Renders again every `everyMs`, while `isOn`. */
export function useTick(isOn: boolean, everyMs: number): void {
  const [, tick] = useState(0);
  useEffect(() => {
    if (!isOn) return;
    const timer = setInterval(() => tick((n) => n + 1), everyMs);
    return () => clearInterval(timer);
  }, [isOn, everyMs]);
}
