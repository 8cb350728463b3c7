import { useCallback, useRef, useState } from "preact/hooks";

/** Width of an element in whole CSS pixels, 0 until it is laid out; and the `ref` for it. */
export function useWidth(): [number, (element: HTMLElement | null) => void] {
  const [widthPx, setWidthPx] = useState(0);
  const observer = useRef<ResizeObserver | null>(null);
  // A section that unfolds has a new element: a callback is notified of it, an effect is not.
  const ref = useCallback((element: HTMLElement | null) => {
    observer.current?.disconnect();
    observer.current = null;
    if (element === null) return;
    const measure = () => setWidthPx(Math.floor(element.clientWidth));
    measure();
    observer.current = new ResizeObserver(measure);
    observer.current.observe(element);
  }, []);
  return [widthPx, ref];
}
