import { pan } from "../range";
import { pxPerS, type Scale, toTime } from "./geometry";

/** User interactions on the canvas. */
export interface PointerActions {
  scale: () => Scale;
  /** Zooms in (`factor` < 1) at a time. */
  zoom: (atS: number, factor: number) => void;
  /** Moves to other times, with the same width. */
  move: (range: readonly [number, number]) => void;
  hover: (x: number, y: number) => void;
  leave: () => void;
  click: (x: number, y: number) => void;
}

const LINE_PX = 16;
/** Pixels of the wheel that halve or double the visible range. */
const DOUBLING_PX = 300;
/** Maximum movement of a click. */
const CLICK_PX = 3;

/** A wheel turn as a factor of the range; null if it should scroll the page. */
export function wheelFactor(event: WheelEvent): number | null {
  if (!(event.ctrlKey || event.metaKey || event.altKey)) return null;
  const px = event.deltaMode === 1 ? event.deltaY * LINE_PX : event.deltaY;
  return 2 ** (Math.max(-DOUBLING_PX, Math.min(DOUBLING_PX, px)) / DOUBLING_PX);
}

/** Listens on the canvas; the return value ends it. */
export function listen(canvas: HTMLCanvasElement, actions: PointerActions): () => void {
  const ending = new AbortController();
  const { signal } = ending;
  const wheel = (event: WheelEvent) => {
    const factor = wheelFactor(event);
    if (factor === null) return;
    event.preventDefault();
    actions.zoom(toTime(actions.scale(), event.offsetX), factor);
  };
  canvas.addEventListener("wheel", wheel, { passive: false, signal });
  canvas.addEventListener("pointerdown", (event) => drag(canvas, event, actions), { signal });
  canvas.addEventListener("pointermove", (e) => e.buttons || actions.hover(e.offsetX, e.offsetY), {
    signal,
  });
  canvas.addEventListener("pointerleave", () => actions.leave(), { signal });
  return () => ending.abort();
}

function drag(canvas: HTMLCanvasElement, down: PointerEvent, actions: PointerActions): void {
  if (down.button !== 0) return;
  const scale = actions.scale();
  const ending = new AbortController();
  let isMoved = false;
  canvas.setPointerCapture(down.pointerId);
  const move = (event: PointerEvent) => {
    const px = event.offsetX - down.offsetX;
    isMoved ||= Math.abs(px) > CLICK_PX;
    if (!isMoved) return;
    actions.leave();
    const everywhere = [Number.NEGATIVE_INFINITY, Number.POSITIVE_INFINITY] as const;
    actions.move(pan(scale.range, -px / pxPerS(scale), everywhere));
  };
  const up = () => {
    ending.abort();
    if (!isMoved) actions.click(down.offsetX, down.offsetY);
  };
  canvas.addEventListener("pointermove", move, { signal: ending.signal });
  canvas.addEventListener("pointerup", up, { signal: ending.signal });
  canvas.addEventListener("pointercancel", () => ending.abort(), { signal: ending.signal });
}
