import { useEffect, useRef } from "preact/hooks";
import { lowerBound, num } from "../columns";
import type { Range } from "../range";
import type { Ask } from "../view/props";
import type { CurveStore, Metric } from "./store";

/** Delay, so that a drag does not request every range on its way. */
const REST_MS = 250;
/** If no point is added for this long, the last ones are requested. */
const QUIET_MS = 1500;
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

/**
 * Requests finer buckets from the kernel after the user has zoomed in and stopped; and again while the
 * range fills, in sixteenths of it, and when nothing has been added for a while.
 */
export function useDetail(
  store: CurveStore,
  metric: Metric,
  range: Range | null,
  widthPx: number,
  ask: Ask,
): void {
  const { name, width } = metric;
  /** Number of points in the requested steps at the time of the request. */
  const n_asked = useRef(-1);
  const request = () => {
    const wanted = wantedDetail(metric, range);
    if (range === null || wanted === null) return;
    const held = store.detailFor(name, ...range);
    if (held !== null && pointsIn(metric, [held.from, held.until]) === n_asked.current) return;
    n_asked.current = pointsIn(metric, wanted);
    const [from, until] = wanted;
    void ask({ do: "detail", metric: name, from, until, buckets: 2 * widthPx });
  };
  const later = (delayMs: number) => () => {
    if (wantedDetail(metric, range) === null) return;
    const timer = setTimeout(request, delayMs);
    return () => clearTimeout(timer);
  };
  const n_points = wantedDetail(metric, range) && pointsIn(metric, range);
  useEffect(later(REST_MS), [store, name, width, range, sixteenths(metric, range)]);
  useEffect(later(QUIET_MS), [store, name, width, range, n_points]);
}

/** How many sixteenths of the visible range have data. */
function sixteenths(metric: Metric, range: Range | null): number {
  const extent = metric.extent();
  if (range === null || extent === null) return 0;
  const share = (extent[1] - range[0]) / (range[1] - range[0]);
  return Math.floor(16 * Math.min(1, Math.max(0, share)));
}

/** Number of points of all series in the buckets that lie in the range, or partly. */
function pointsIn(metric: Metric, range: Range | null): number {
  if (range === null) return 0;
  let n_points = 0;
  for (const { keys, counts, n } of metric.series.values()) {
    const last = range[1] / metric.width;
    for (let i = lowerBound(keys, n, Math.floor(range[0] / metric.width)); i < n; i++) {
      if (num(keys, i) > last) break;
      n_points += num(counts, i);
    }
  }
  return n_points;
}
