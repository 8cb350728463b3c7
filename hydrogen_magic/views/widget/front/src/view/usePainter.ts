import { useEffect, useRef, useState } from "preact/hooks";
import { Painter } from "../painter";

/** Calls the latest `paint` when asked, at a limited rate, until the component is removed. */
export function usePainter(paint: () => void, minIntervalMs: number): Painter {
  const latest = useRef(paint);
  latest.current = paint;
  const [painter] = useState(() => new Painter(() => latest.current(), minIntervalMs));
  useEffect(() => () => painter.end(), [painter]);
  return painter;
}
