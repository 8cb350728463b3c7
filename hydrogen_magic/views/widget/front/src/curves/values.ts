import { num } from "../columns";
import { ALL_RANKS } from "../protocol";
import { ranksOf, stepOf } from "./shape";
import type { Buckets, Metric } from "./store";

export interface RankValue {
  rank: number;
  value: number;
}

/** What a chart says in words about one step: the reader's, or the last one. */
export interface Reading {
  /** First and last step of the bucket. */
  steps: readonly [number, number];
  mean: number | null;
  ranks: RankValue[];
}

/** Values of all ranks at `step`; null: of the last step. */
export function readAt(metric: Metric, step: number | null): Reading | null {
  const extent = metric.extent();
  if (extent === null) return null;
  const { width } = metric;
  const key = Math.floor((step ?? extent[1]) / width);
  const last = Math.min((key + 1) * width - 1, extent[1]);
  const at = (rank: number) => valueAt(metric.series.get(rank), key, step === null);
  const ranks: RankValue[] = [];
  for (const rank of ranksOf(metric)) {
    const value = at(rank);
    if (value !== null) ranks.push({ rank, value });
  }
  return { steps: [key * width, last], mean: at(ALL_RANKS), ranks };
}

/** The bucket's mean; with `isLast`, of the last one there is: ranks are not all equally far. */
function valueAt(buckets: Buckets | undefined, key: number, isLast: boolean): number | null {
  if (buckets === undefined || buckets.n === 0) return null;
  const i = isLast ? buckets.n - 1 : buckets.find(key);
  return i < 0 ? null : num(buckets.means, i);
}

/** Lowest and highest of many. */
export function extremes(values: readonly RankValue[]): [RankValue, RankValue] | null {
  const [first] = values;
  if (first === undefined) return null;
  return values.reduce<[RankValue, RankValue]>(
    ([low, high], v) => [v.value < low.value ? v : low, v.value > high.value ? v : high],
    [first, first],
  );
}

const quoted = (text: string) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** Everything known here as a table, for when the kernel does not answer. */
export function csv(metrics: Iterable<Metric>): string {
  const rows = ["metric,rank,first_step,steps_per_bucket,middle_step,count,mean,min,max"];
  for (const metric of metrics) {
    const name = quoted(metric.name);
    for (const rank of ranksOf(metric)) {
      const b = metric.series.get(rank) as Buckets;
      for (let i = 0; i < b.n; i++) {
        const key = num(b.keys, i);
        const place = [key * metric.width, metric.width, stepOf(key, metric.width)];
        const values = [b.counts, b.means, b.mins, b.maxs].map((column) => num(column, i));
        rows.push([name, rank, ...place, ...values].join());
      }
    }
  }
  return `${rows.join("\n")}\n`;
}
