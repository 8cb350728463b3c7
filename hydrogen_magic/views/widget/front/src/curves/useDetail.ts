import { useEffect } from "preact/hooks";
import { lowerBound, num } from "../columns";
import type { Range } from "../range";
import type { Ask } from "../view/props";
import { usePainter } from "../view/usePainter";
import type { CurveStore, Metric } from "./store";

/** A drag, or a run that logs, does not request every range on its way. */
const INTERVAL_MS = 500;
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
 * Requests finer buckets from the kernel when the user has zoomed in, and again as points are added
 * to the visible steps, at a limited rate.
 */
export function useDetail(
  store: CurveStore,
  metric: Metric,
  range: Range | null,
  widthPx: number,
  ask: Ask,
): void {
  const { name, width } = metric;
  const wanted = wantedDetail(metric, range);
  const asker = usePainter(() => {
    if (wanted === null) return;
    const [from, until] = wanted;
    void ask({ do: "detail", metric: name, from, until, buckets: 2 * widthPx });
  }, INTERVAL_MS);
  const n_points = range && wanted && pointsIn(metric, range);
  useEffect(() => {
    if (n_points !== null) asker.ask();
  }, [store, name, width, range, n_points]);
}

/** Number of points of all series in the buckets that lie in the range, or partly. */
function pointsIn(metric: Metric, range: Range): number {
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
