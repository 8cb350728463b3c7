import { lowerBound, num, Table, upperBound, withRoom } from "../columns";
import { Bins, SLOTS } from "./bins";

/** Starts, durations, names of spans of one depth. */
export type SpanColumns = [Float64Array, Float32Array, Uint16Array];

/** Rows with fewer spans are summed span by span, until some are dropped. */
export const ENOUGH_FOR_BINS = 4096;

/** The spans of one lane that have the same depth, sorted by start. */
export class Row {
  private readonly table = new Table<SpanColumns>([
    new Float64Array(0),
    new Float32Array(0),
    new Uint16Array(0),
  ]);
  /** The latest end of all spans up to each: increases even if spans of two threads overlap. */
  private reach = new Float64Array(0);
  private bins: Bins | null = null;
  /** The earliest start of all spans so far, including dropped ones. */
  firstS = Number.POSITIVE_INFINITY;
  /** All names in the row so far. */
  readonly namesSeen = new Set<number>();

  constructor(private readonly slotOf: (name: number) => number) {}

  get n(): number {
    return this.table.n;
  }
  get starts(): Float64Array {
    return this.table.columns[0];
  }
  get durations(): Float32Array {
    return this.table.columns[1];
  }
  get names(): Uint16Array {
    return this.table.columns[2];
  }
  get startS(): number {
    return this.n > 0 ? num(this.starts, 0) : 0;
  }
  get endS(): number {
    return this.n > 0 ? num(this.reach, this.n - 1) : 0;
  }

  endOf(i: number): number {
    return num(this.starts, i) + num(this.durations, i);
  }

  /** Inserts spans that are sorted by start. */
  insert(fresh: SpanColumns): void {
    const from = this.table.insert(fresh, "keep both");
    this.extendReach(from);
    for (const name of fresh[2]) this.namesSeen.add(name);
    this.firstS = Math.min(this.firstS, fresh[0][0] ?? this.firstS);
    if (this.bins !== null) this.fill(this.bins, fresh, fresh[0].length);
    else if (this.n > ENOUGH_FOR_BINS) this.makeBins();
  }

  /** Indices `[first, last)` of the spans between two times, possibly with some more. */
  between(fromS: number, untilS: number): [number, number] {
    const last = lowerBound(this.starts, this.n, untilS);
    return [Math.min(last, upperBound(this.reach, this.n, fromS)), last];
  }

  /**
   * Index of the span at a time: the last one to begin if there are several; -1 if there is none.
   */
  at(timeS: number): number {
    const [first, last] = this.between(timeS, timeS);
    for (let i = upperBound(this.starts, this.n, timeS) - 1; i >= Math.min(first, last); i--) {
      if (this.endOf(i) > timeS) return i;
    }
    return -1;
  }

  /** Number of spans that began before a time. */
  countBefore(timeS: number): number {
    return lowerBound(this.starts, this.n, timeS);
  }

  /** Removes the oldest spans; the bins keep their seconds. */
  dropFirst(n: number): void {
    if (n === 0) return;
    if (this.bins === null) this.makeBins();
    this.table.dropFirst(n);
    this.extendReach(0);
  }

  /** Adds up seconds per column and slot; see `Bins.addTo`. */
  addTo(sums: Float64Array, fromS: number, columnS: number, n_columns: number): void {
    if (this.bins !== null && this.bins.widthS <= columnS) {
      this.bins.addTo(sums, fromS, columnS, n_columns);
    } else this.addSpansTo(sums, fromS, columnS, n_columns);
  }

  private addSpansTo(sums: Float64Array, fromS: number, columnS: number, n_columns: number): void {
    const { starts, durations, names } = this;
    const [first, last] = this.between(fromS, fromS + columnS * n_columns);
    for (let i = first; i < last; i++) {
      const begin = Math.max(0, (num(starts, i) - fromS) / columnS);
      const end = Math.min(n_columns, (num(starts, i) + num(durations, i) - fromS) / columnS);
      const slot = this.slotOf(num(names, i));
      for (let column = Math.floor(begin); column < end; column++) {
        const at = column * SLOTS + slot;
        const share = Math.min(end, column + 1) - Math.max(begin, column);
        sums[at] = num(sums, at) + share * columnS;
      }
    }
  }

  private makeBins(): void {
    this.bins = new Bins();
    this.fill(this.bins, this.table.columns, this.n);
  }

  private fill(bins: Bins, [starts, durations, names]: SpanColumns, n: number): void {
    for (let i = 0; i < n; i++) {
      bins.add(num(starts, i), num(durations, i), this.slotOf(num(names, i)));
    }
  }

  private extendReach(from: number): void {
    this.reach = withRoom(this.reach, this.n);
    let latest = from > 0 ? num(this.reach, from - 1) : Number.NEGATIVE_INFINITY;
    for (let i = from; i < this.n; i++) {
      latest = Math.max(latest, this.endOf(i));
      this.reach[i] = latest;
    }
  }
}
