import { lowerBound, num } from "../columns";
import { ALL_RANKS } from "../protocol";
import type { Buckets, Metric } from "./store";

export type Mode = "mean" | "ranks" | "both";

/** Up to this many ranks, their lines are in front of the mean; with more, the mean is. */
export const FEW_LINES = 8;
/** Relative difference of values that are drawn as equal: that of sums in a different order. */
const ALIKE = 1e-5;

export interface Options {
  mode: Mode;
  /** Weight of the past in the moving average, 0 (none) to below 1. */
  smoothing: number;
  isLog: boolean;
}

/**
 * `low` and `high` limit the band; `halo` is the mean, wide and soft below the lines of ranks;
 * `faint` is the original of a smoothed line.
 */
export interface Line {
  role: "high" | "low" | "halo" | "rank" | "mean";
  rank: number;
  isFaint: boolean;
}

/** Undefined where a series has no bucket, which its line spans; null where a line is interrupted. */
export type Values = (number | null | undefined)[];

/** The contents of a plot: lines in drawing order, all over the same steps. */
export interface Shape {
  lines: Line[];
  steps: number[];
  values: Values[];
  /** False if the user wants a logarithmic axis and no value is positive. */
  isLog: boolean;
}

/** Exponential moving average without the bias towards zero at the start; gaps are kept. */
export function smooth(values: Values, weight: number): Values {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === undefined || value === null) return value;
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

/** Ranks with values of their own, in order; those of some are only not finite. */
export function ranksOf(metric: Metric): number[] {
  return [...metric.series.keys()].filter((rank) => rank !== ALL_RANKS).sort((a, b) => a - b);
}

/** Ranks with their own curve, in order. Of a large gang, these are few. */
export const ranksWithCurve = (metric: Metric): number[] =>
  ranksOf(metric).filter((rank) => (metric.series.get(rank)?.n ?? 0) > 0);

/** The step at which a bucket is drawn: the middle of its steps. */
export const stepOf = (key: number, width: number): number => key * width + (width - 1) / 2;

/** `column` of `n` buckets at the keys of the plot; null for values that have no logarithm. */
function aligned(
  { keys: own }: Buckets,
  n: number,
  column: Float64Array,
  keys: Float64Array,
  isLog: boolean,
) {
  const values: Values = new Array(keys.length);
  let i = 0;
  for (let k = 0; k < keys.length; k++) {
    const key = num(keys, k);
    while (i < n && num(own, i) < key) i++;
    if (i === n || num(own, i) !== key) continue;
    const value = num(column, i);
    values[k] = isLog && value <= 0 ? null : value;
  }
  return values;
}

export const isPositive = (buckets: Buckets) =>
  buckets.maxs.subarray(0, buckets.n).some((value) => value > 0);

/**
 * How many buckets of all ranks the mean's line has: the whole ones before its end, and at least the
 * first, as in `curve_tips.py`. In the others, the ranks that are ahead count more than the rest. The line
 * that all ranks have in common is that of each of them, and has no end before theirs.
 */
function lengthOfMean(metric: Metric, all: Buckets): number {
  const { tip } = metric;
  if (tip === null || tip.end === null || areAlike(metric)) return all.n;
  const isBefore = all.n > 0 && num(all.keys, 0) * metric.width <= tip.step; // not a detail beyond it
  return Math.max(
    Number(isBefore),
    lowerBound(all.keys, all.n, Math.floor(tip.end / metric.width)),
  );
}

/**
 * Turns the curves of a metric (or of a detail of it) into lines. The series of all ranks has the keys
 * of every rank: what a rank has logged before that series has it is drawn with the next message.
 */
export function shape(metric: Metric, options: Options): Shape {
  const all = metric.series.get(ALL_RANKS);
  if (all === undefined) return { lines: [], steps: [], values: [], isLog: false };
  const isLog = options.isLog && isPositive(all);
  const keys = all.keys.slice(0, all.n);
  const made: Shape = { lines: [], steps: [], values: [], isLog };
  made.steps = Array.from(keys, (key) => stepOf(key, metric.width));
  const add = (role: Line["role"], rank: number, isFaint: boolean, values: Values) => {
    made.lines.push({ role, rank, isFaint });
    made.values.push(values);
  };
  const n_ofMean = lengthOfMean(metric, all);
  for (const { role, rank, buckets } of chosen(metric, all, options.mode)) {
    const n = rank === ALL_RANKS ? n_ofMean : buckets.n;
    const column = role === "high" ? buckets.maxs : role === "low" ? buckets.mins : buckets.means;
    const values = aligned(buckets, n, column, keys, isLog);
    const isSmoothed = options.smoothing > 0 && role !== "high" && role !== "low";
    if (!isSmoothed || role !== "halo") add(role, rank, isSmoothed, values);
    if (isSmoothed) add(role, rank, false, smooth(values, options.smoothing));
  }
  return made;
}

interface Chosen {
  role: Line["role"];
  rank: number;
  buckets: Buckets;
}

/** The layers, from back to front. */
function chosen(metric: Metric, all: Buckets, mode: Mode): Chosen[] {
  const drawn = mode === "mean" || areAlike(metric) ? [] : ranksWithCurve(metric);
  const lines = drawn.map((rank): Chosen => {
    return { role: "rank", rank, buckets: metric.series.get(rank) as Buckets };
  });
  if (mode === "ranks" && lines.length > 0) return lines;
  const mean = { rank: ALL_RANKS, buckets: all };
  const band: Chosen[] =
    mode === "ranks"
      ? []
      : [
          { role: "high", ...mean },
          { role: "low", ...mean },
        ];
  if (lines.length === 0 || lines.length > FEW_LINES) {
    return [...band, ...lines, { role: "mean", ...mean }];
  }
  return [...band, { role: "halo", ...mean }, ...lines];
}

/** Whether all ranks have the same curve, for example a learning rate: it is drawn once. */
export function areAlike(metric: Metric): boolean {
  const ranks = ranksOf(metric);
  const all = metric.series.get(ALL_RANKS);
  if (all === undefined) return ranks.length === 1;
  const badSteps = new Set(ranks.map((rank) => metric.series.get(rank)?.badStep ?? null));
  if (badSteps.size > 1) return false; // some ranks have NaN, which is in no bucket
  return ranks.every((rank) => isLike(metric.series.get(rank), all));
}

function isLike(buckets: Buckets | undefined, all: Buckets): boolean {
  for (let i = 0; i < (buckets?.n ?? 0); i++) {
    const mine = num((buckets as Buckets).means, i);
    const k = all.find(num((buckets as Buckets).keys, i));
    if (k < 0 || Math.abs(mine - num(all.means, k)) > ALIKE * Math.abs(mine)) return false;
  }
  return true;
}

/** Rank and step of the first non-finite value; null if there is none. */
export function firstBad(metric: Metric): { step: number; ranks: number[] } | null {
  let step = Number.POSITIVE_INFINITY;
  let ranks: number[] = [];
  for (const rank of ranksOf(metric)) {
    const bad = metric.series.get(rank)?.badStep ?? null;
    if (bad === null || bad > step) continue;
    ranks = bad < step ? [rank] : [...ranks, rank];
    step = bad;
  }
  return ranks.length === 0 ? null : { step, ranks };
}
