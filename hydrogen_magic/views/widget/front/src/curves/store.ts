import { type Column, lowerBound, num, readerOf, Table } from "../columns";
import { valueAt } from "../maps";
import type { CurveDelta, Detail, Tip } from "../protocol";

/** Keys, counts, means, minima, maxima. */
export type BucketColumns = [Float64Array, Float64Array, Float64Array, Float64Array, Float64Array];

const bucketColumns = (make: () => Float64Array) =>
  Array.from({ length: 5 }, make) as BucketColumns;

/** Buckets of one rank's curve; the columns are longer than `n`. */
export class Buckets {
  /** First step with a non-finite value; null if there is none. */
  badStep: number | null = null;
  private readonly table = new Table<BucketColumns>(bucketColumns(() => new Float64Array(0)));

  get n(): number {
    return this.table.n;
  }
  get keys(): Float64Array {
    return this.table.columns[0];
  }
  get counts(): Float64Array {
    return this.table.columns[1];
  }
  get means(): Float64Array {
    return this.table.columns[2];
  }
  get mins(): Float64Array {
    return this.table.columns[3];
  }
  get maxs(): Float64Array {
    return this.table.columns[4];
  }

  /** Inserts new or changed buckets. */
  put(fresh: BucketColumns): void {
    this.table.insert(fresh, "replace");
  }

  /** Index of the bucket with `key`; -1 if there is none. */
  find(key: number): number {
    const i = lowerBound(this.keys, this.n, key);
    return i < this.n && num(this.keys, i) === key ? i : -1;
  }

  /** Makes every bucket `ratio` times as wide. */
  coarsen(ratio: number): void {
    const { keys, n } = this;
    let into = -1;
    for (let i = 0; i < n; i++) {
      const key = Math.floor(num(keys, i) / ratio);
      if (into >= 0 && num(keys, into) === key) this.addTo(into, i);
      else this.move(i, ++into, key);
    }
    this.table.n = into + 1;
  }

  private addTo(into: number, i: number): void {
    const { counts, means, mins, maxs } = this;
    const [mine, other] = [num(counts, into), num(counts, i)];
    means[into] = (num(means, into) * mine + num(means, i) * other) / (mine + other);
    counts[into] = mine + other;
    mins[into] = Math.min(num(mins, into), num(mins, i));
    maxs[into] = Math.max(num(maxs, into), num(maxs, i));
  }

  private move(from: number, to: number, key: number): void {
    for (const column of this.table.columns as Column[]) column[to] = num(column, from);
    this.keys[to] = key;
  }
}

/** All curves of one metric. */
export class Metric {
  /** Steps per bucket, a power of two. */
  width = 1;
  readonly series = new Map<number, Buckets>();
  /** Where the mean of all ranks ends; null without data. */
  tip: Tip | null = null;
  /** Incremented by every change. */
  version = 0;

  constructor(readonly name: string) {}

  apply(delta: CurveDelta, buffers: readonly DataView[]): void {
    if (delta.replaces) this.series.clear();
    this.widen(delta.width);
    this.tip = delta.tip ?? null;
    const reader = readerOf(buffers, delta.at, `curves of ${delta.metric}`);
    for (const { rank, n, bad_step } of delta.series) {
      const mine = this.seriesOf(rank);
      mine.put(bucketColumns(() => reader.take(Float64Array, n)));
      if (bad_step !== undefined) mine.badStep = bad_step;
    }
    this.version += 1;
  }

  /** Drops the curve of a rank; where its values stopped being finite is known of every rank. */
  drop(rank: number): void {
    const badStep = this.series.get(rank)?.badStep ?? null;
    if (!this.series.delete(rank)) return;
    if (badStep !== null) this.seriesOf(rank).badStep = badStep;
    this.version += 1;
  }

  /**
   * The first and the last step of any rank, including the first one with a non-finite value; null
   * without data.
   */
  extent(): [number, number] | null {
    let [first, last] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
    const include = (from: number, until: number) => {
      first = Math.min(first, from);
      last = Math.max(last, until);
    };
    for (const { keys, n, badStep } of this.series.values()) {
      if (n > 0) include(num(keys, 0) * this.width, (num(keys, n - 1) + 1) * this.width - 1);
      if (badStep !== null) include(badStep, badStep);
    }
    return first > last ? null : [first, last];
  }

  private widen(width: number): void {
    if (width > this.width) {
      for (const buckets of this.series.values()) buckets.coarsen(width / this.width);
    }
    this.width = width;
  }

  private seriesOf(rank: number): Buckets {
    return valueAt(this.series, rank, () => new Buckets());
  }
}

/** Finer buckets of one metric for the steps `from <= step < until`. */
export interface DetailView {
  from: number;
  until: number;
  metric: Metric;
}

/**
 * Every curve of a gang as sent by the kernel, and the details of ranges that the user zoomed into.
 */
export class CurveStore {
  /** In the order of first appearance. */
  readonly metrics = new Map<string, Metric>();
  private readonly details = new Map<string, DetailView>();

  clear(): void {
    this.metrics.clear();
    this.details.clear();
  }

  apply(deltas: readonly CurveDelta[], buffers: readonly DataView[]): void {
    for (const delta of deltas) {
      const metric = valueAt(this.metrics, delta.metric, () => new Metric(delta.metric));
      metric.apply(delta, buffers);
      if (delta.replaces) this.details.delete(delta.metric);
    }
  }

  /** Drops the curves of ranks that are no longer sent. */
  drop(ranks: readonly number[]): void {
    const details = [...this.details.values()].map((detail) => detail.metric);
    for (const metric of [...this.metrics.values(), ...details]) ranks.forEach(metric.drop, metric);
  }

  /** One detail per metric is kept: that of the visible range. */
  applyDetail(detail: Detail, buffers: readonly DataView[]): void {
    const metric = new Metric(detail.metric);
    metric.width = detail.width;
    metric.apply(detail, buffers);
    this.details.set(detail.metric, { from: detail.from, until: detail.until, metric });
    const known = this.metrics.get(detail.metric);
    if (known !== undefined) known.version += 1;
  }

  /**
   * The detail to draw for these steps: it contains all of them, and is finer than the overview.
   */
  detailFor(name: string, from: number, until: number): DetailView | null {
    const detail = this.details.get(name);
    const known = this.metrics.get(name);
    if (detail === undefined || known === undefined) return null;
    const isInside = detail.from <= from && until <= detail.until;
    return isInside && detail.metric.width < known.width ? detail : null;
  }
}
