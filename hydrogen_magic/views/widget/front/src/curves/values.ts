import { num } from "../columns";
import { ALL_RANKS, type Figure, type Rank } from "../protocol";
import { ranksOf } from "./shape";
import type { Buckets, Metric } from "./store";

export interface RankValue {
  rank: number;
  value: number;
}

/** Text of a chart about one step, or about the ranks' last values. */
export interface Reading {
  /** First and last step of the bucket, or the step of the mean; null: that of the newest mean. */
  steps: readonly [number, number] | null;
  mean: number | null;
  ranks: RankValue[];
}

/** Values of all ranks at a step, from the bucket that contains it. */
export function readAt(metric: Metric, step: number): Reading | null {
  const extent = metric.extent();
  if (extent === null) return null;
  const { width } = metric;
  const key = Math.floor(step / width);
  const end = (key + 1) * width;
  const isBad = (rank: number) => (metric.series.get(rank)?.badStep ?? end) < end;
  const at = (rank: number) =>
    meanOf(metric, rank, (buckets) => buckets.find(key)) ?? (isBad(rank) ? Number.NaN : null);
  return {
    steps: [key * width, Math.min(end - 1, extent[1])],
    mean: at(ALL_RANKS),
    ranks: valuesOf(metric, at),
  };
}

/** Rows of the table of ranks, and the number of ranks: large gangs do not have all rows. */
export interface Rows {
  np: number;
  ranks: ReadonlyMap<number, Rank>;
}

/**
 * The ranks' last values from the table, and the mean at the newest step that most of them have reached.
 * A large gang tells that step, since it does not show all values that it is the mean of.
 */
export function readLast(metric: Metric, rows: Rows): Reading | null {
  const { tip } = metric;
  if (tip === null) return null;
  const last = (rank: number) => meanOf(metric, rank, (buckets) => buckets.n - 1);
  const told = (rank: number) => numberOf(rows.ranks.get(rank)?.metrics[metric.name]);
  const ranks = valuesOf(metric, (rank) => told(rank) ?? last(rank));
  const isAll = ranks.length > 0 && rows.ranks.size >= rows.np;
  const steps = isAll || rows.np === 1 ? null : ([tip.step, tip.step] as const);
  return { steps, mean: numberOf(tip.mean), ranks };
}

function valuesOf(metric: Metric, at: (rank: number) => number | null): RankValue[] {
  const values = ranksOf(metric).map((rank) => ({ rank, value: at(rank) }));
  return values.filter((one): one is RankValue => one.value !== null);
}

/** The mean of the bucket at an index; null if there is none. */
function meanOf(metric: Metric, rank: number, at: (buckets: Buckets) => number): number | null {
  const buckets = metric.series.get(rank);
  const i = buckets ? at(buckets) : -1;
  return buckets === undefined || i < 0 ? null : num(buckets.means, i);
}

const WORDS = { nan: Number.NaN, inf: Number.POSITIVE_INFINITY, "-inf": Number.NEGATIVE_INFINITY };

const numberOf = (figure: Figure | undefined): number | null =>
  figure === undefined ? null : typeof figure === "number" ? figure : WORDS[figure];
