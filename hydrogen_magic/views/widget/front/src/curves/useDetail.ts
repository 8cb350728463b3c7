import { useEffect } from "preact/hooks";
import type { Range } from "../range";
import type { Ask } from "../view/props";
import type { CurveStore, Metric } from "./store";

/** Delay, so that a drag does not request every range on its way. */
const REST_MS = 250;
/** If more buckets than this are visible, finer ones would not be distinguishable. */
const ENOUGH_BUCKETS = 240;

/**
 * The detail to request: the visible steps and half as many at each side, so that a little panning
 * needs no other one; null if the existing data is fine enough.
 */
export function wantedDetail(metric: Metric, range: Range | null): Range | null {
  if (range === null || metric.width === 1) return null;
  const n_steps = range[1] - range[0];
  if (n_steps / metric.width > ENOUGH_BUCKETS) return null;
  return [Math.max(0, Math.floor(range[0] - n_steps / 2)), Math.ceil(range[1] + n_steps / 2) + 1];
}

/** Requests finer buckets from the kernel after the user has zoomed in and stopped. */
export function useDetail(
  store: CurveStore,
  metric: Metric,
  range: Range | null,
  widthPx: number,
  ask: Ask,
): void {
  const { name, width } = metric;
  const growth = growthInside(metric, range);
  // `growth` and `width` show that an existing detail is too old
  useEffect(() => {
    const wanted = wantedDetail(metric, range);
    if (range === null || wanted === null) return;
    if (store.detailFor(name, ...range) !== null && growth === 0) return;
    const command = { do: "detail", metric: name, from: wanted[0], until: wanted[1] } as const;
    const timer = setTimeout(() => void ask({ ...command, buckets: 2 * widthPx }), REST_MS);
    return () => clearTimeout(timer);
  }, [store, name, width, range, growth]);
}

/** How many sixteenths of the visible range have data; 0 when it is full. */
function growthInside(metric: Metric, range: Range | null): number {
  const extent = metric.extent();
  if (range === null || extent === null || extent[1] >= range[1]) return 0;
  return 1 + Math.floor((16 * (extent[1] - range[0])) / (range[1] - range[0]));
}
