import { useEffect } from "preact/hooks";
import type { Range } from "../range";
import type { Ask } from "../view/props";
import type { CurveStore, Metric } from "./store";

/** A reader who drags on would ask for every place on the way. */
const REST_MS = 250;
/** With more buckets than this in sight, finer ones would not be told apart. */
const ENOUGH_BUCKETS = 240;

/**
 * Which detail would help: the steps in sight and half as many at each side, so that a little
 * panning needs no other; null where what is known is fine enough.
 */
export function wantedDetail(metric: Metric, range: Range | null): Range | null {
  if (range === null || metric.width === 1) return null;
  const n_steps = range[1] - range[0];
  if (n_steps / metric.width > ENOUGH_BUCKETS) return null;
  return [Math.max(0, Math.floor(range[0] - n_steps / 2)), Math.ceil(range[1] + n_steps / 2) + 1];
}

/** Asks the kernel for finer buckets once the reader has zoomed in and rests. */
export function useDetail(
  store: CurveStore,
  metric: Metric,
  range: Range | null,
  widthPx: number,
  ask: Ask,
): void {
  const { name, width } = metric;
  const growth = growthInside(metric, range);
  // `growth` and `width` tell that a known detail is too old
  useEffect(() => {
    const wanted = wantedDetail(metric, range);
    if (range === null || wanted === null) return;
    if (store.detailFor(name, ...range) !== null && growth === 0) return;
    const order = { do: "detail", metric: name, from: wanted[0], until: wanted[1] } as const;
    const timer = setTimeout(() => void ask({ ...order, buckets: 2 * widthPx }), REST_MS);
    return () => clearTimeout(timer);
  }, [store, name, width, range, growth]);
}

/** How many sixteenths of the range have filled while it is looked at; 0 when it is full. */
function growthInside(metric: Metric, range: Range | null): number {
  const extent = metric.extent();
  if (range === null || extent === null || extent[1] >= range[1]) return 0;
  return 1 + Math.floor((16 * (extent[1] - range[0])) / (range[1] - range[0]));
}
