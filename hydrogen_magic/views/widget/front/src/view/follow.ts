import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

/** Tolerance for fractions of a pixel and rounding at the end. */
const NEAR_PX = 4;

export interface Follow {
  isOn: boolean;
  letGo: () => void;
  resume: () => void;
}

/**
 * Keeps a box scrolled to its end as it grows, until the user scrolls up; at the end it resumes.
 */
export function useFollow(box: RefObject<HTMLElement>, ...grows: unknown[]): Follow {
  const [isOn, setOn] = useState(true);
  const lastTop = useRef(0);
  useLayoutEffect(() => {
    if (isOn && box.current) toEnd(box.current, lastTop);
  }, [isOn, ...grows]);
  useEffect(() => {
    const element = box.current;
    if (element === null || !isOn) return;
    // A notebook lays the box out after it is filled, and the user may resize it.
    const resized = new ResizeObserver(() => toEnd(element, lastTop));
    resized.observe(element);
    return () => resized.disconnect();
  }, [isOn, box.current]);
  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const scrolled = () => {
      const { scrollTop } = element;
      if (isAtEnd(element)) setOn(true);
      else if (scrollTop < lastTop.current - 1) setOn(false); // growth alone never scrolls up
      lastTop.current = scrollTop;
    };
    element.addEventListener("scroll", scrolled, { passive: true });
    return () => element.removeEventListener("scroll", scrolled);
  });
  return { isOn, letGo: () => setOn(false), resume: () => setOn(true) };
}

const isAtEnd = (element: HTMLElement) =>
  element.scrollHeight - element.clientHeight - element.scrollTop <= NEAR_PX;

function toEnd(element: HTMLElement, lastTop: { current: number }): void {
  element.scrollTop = element.scrollHeight;
  lastTop.current = element.scrollTop;
}
