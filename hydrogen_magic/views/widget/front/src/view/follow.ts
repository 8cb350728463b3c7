import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

/** Tolerance for fractions of a pixel and rounding at the end. */
const NEAR_PX = 4;

export interface Follow {
  isOn: boolean;
  letGo: () => void;
  resume: () => void;
}

/**
 * Keeps a box scrolled to its end as it grows, until the user scrolls up; at the end it resumes. The
 * box is state of the component: a section that unfolds has a new one, which a ref does not tell.
 */
export function useFollow(box: HTMLElement | null, ...grows: unknown[]): Follow {
  const [isOn, setOn] = useState(true);
  const lastTop = useRef(0);
  useLayoutEffect(() => {
    if (isOn && box) toEnd(box, lastTop);
  }, [isOn, box, ...grows]);
  useEffect(() => {
    if (box === null || !isOn) return;
    // A notebook lays the box out after it is filled, and the user may resize it.
    const resized = new ResizeObserver(() => toEnd(box, lastTop));
    resized.observe(box);
    return () => resized.disconnect();
  }, [isOn, box]);
  useEffect(() => {
    if (box === null) return;
    const scrolled = () => {
      const { scrollTop } = box;
      if (isAtEnd(box)) setOn(true);
      else if (scrollTop < lastTop.current - 1) setOn(false); // growth alone never scrolls up
      lastTop.current = scrollTop;
    };
    box.addEventListener("scroll", scrolled, { passive: true });
    return () => box.removeEventListener("scroll", scrolled);
  }, [box]);
  return { isOn, letGo: () => setOn(false), resume: () => setOn(true) };
}

const isAtEnd = (element: HTMLElement) =>
  element.scrollHeight - element.clientHeight - element.scrollTop <= NEAR_PX;

function toEnd(element: HTMLElement, lastTop: { current: number }): void {
  element.scrollTop = element.scrollHeight;
  lastTop.current = element.scrollTop;
}
