import { type ColumnReader, num, readerOf } from "../columns";
import { valueAt } from "../maps";
import type { SpanDelta } from "../protocol";
import type { Range } from "../range";
import { OTHER_SLOT } from "./bins";
import { Row } from "./row";

/** Maximum number of spans in the page, 22 bytes each; the trace file has all. */
export const MOST_SPANS = 1_000_000;
/** Share of them that is dropped at once, so that this is rare. */
const DROPPED_SHARE = 0.1;

/** The kernel's name for names without their own index. */
const OTHER_NAME = 2 ** 16 - 1;

/** Tracks in the order in which they are drawn; others follow in order of appearance. */
const TRACKS = ["phases", "spans", "coordinator", "collectives", "profiler"];
export const PHASES = "phases";
const PROFILER = "profiler";

/** The spans of one track of a rank. */
export class Lane {
  /** By depth; some may be empty. */
  readonly rows: Row[] = [];
  /** Number of spans that were recorded faster than they could be sent. */
  skipped = 0;

  constructor(
    readonly rank: number,
    readonly track: string,
    private readonly slotOf: (name: number) => number,
  ) {}

  get n(): number {
    return this.rows.reduce((n, row) => n + row.n, 0);
  }

  /** The earliest start of all spans so far, including dropped ones. */
  get firstS(): number {
    return Math.min(...this.rows.map((row) => row.firstS));
  }

  get endS(): number {
    return Math.max(0, ...this.rows.map((row) => row.endS));
  }

  /** Adds new spans in any order. */
  take(reader: ColumnReader, n: number): void {
    const starts = reader.take(Float64Array, n);
    const durations = reader.take(Float32Array, n);
    const names = reader.take(Uint16Array, n);
    const depths = reader.take(Uint8Array, n);
    for (const [depth, picks] of picksByDepth(starts, depths)) {
      this.rowAt(depth).insert([
        Float64Array.from(picks, (i) => num(starts, i)),
        Float32Array.from(picks, (i) => num(durations, i)),
        Uint16Array.from(picks, (i) => num(names, i)),
      ]);
    }
  }

  private rowAt(depth: number): Row {
    while (this.rows.length <= depth) this.rows.push(new Row(this.slotOf));
    return this.rows[depth] as Row;
  }
}

/** Depth -> indices of its spans, in order of their starts. */
function picksByDepth(starts: Float64Array, depths: Uint8Array): Map<number, number[]> {
  const picks = new Map<number, number[]>();
  depths.forEach((depth, i) => {
    valueAt(picks, depth, () => []).push(i);
  });
  for (const mine of picks.values()) mine.sort((a, b) => num(starts, a) - num(starts, b));
  return picks;
}

/** Every span of a gang as sent by the kernel, up to a million of them. */
export class SpanStore {
  names: string[] = [];
  /** All spans since this time are present; 0 while none was dropped or left out. */
  completeSinceS = 0;
  /** Incremented by every change. */
  version = 0;
  /** Number of the page of ranks that is shown; views come and go, and the kernel sends its spans. */
  page = 0;
  /** Spans of the last profile began after this time. */
  profiledSinceS = 0;
  private readonly lanesByKey = new Map<string, Lane>();
  private slots: number[] = [];
  private slotNames: number[] = [];

  constructor(private readonly mostSpans = MOST_SPANS) {}

  get n(): number {
    return [...this.lanesByKey.values()].reduce((n, lane) => n + lane.n, 0);
  }

  /** The latest end of all spans. */
  get endS(): number {
    return Math.max(0, ...[...this.lanesByKey.values()].map((lane) => lane.endS));
  }

  get skipped(): number {
    return [...this.lanesByKey.values()].reduce((n, lane) => n + lane.skipped, 0);
  }

  /** The range of the last profile; null without its spans. */
  get profiled(): Range | null {
    const rows = [...this.lanesByKey.values()].flatMap((lane) =>
      lane.track === PROFILER ? lane.rows : [],
    );
    const found = rows.flatMap((row) => {
      const first = row.countBefore(this.profiledSinceS);
      return first < row.n ? [[num(row.starts, first), row.endS] as const] : [];
    });
    if (found.length === 0) return null;
    return [Math.min(...found.map(([from]) => from)), Math.max(...found.map(([, end]) => end))];
  }

  clear(): void {
    this.names = [];
    this.completeSinceS = 0;
    this.profiledSinceS = 0;
    this.lanesByKey.clear();
    this.slots = [];
    this.slotNames = [];
    this.version += 1;
  }

  /** Takes new spans; `namesAt` is the index of the first new name, since messages may be lost. */
  apply(
    names: readonly string[],
    deltas: readonly SpanDelta[],
    buffers: readonly DataView[],
    namesAt = 0,
  ): void {
    names.forEach((name, k) => {
      this.names[namesAt + k] = name;
    });
    for (const { rank, track, n, skipped, at } of deltas) {
      const lane = this.laneOf(rank, track);
      lane.skipped = skipped;
      if (n === 0) continue;
      lane.take(readerOf(buffers, at, `spans of rank ${rank}, ${track}`), n);
    }
    this.dropOldest();
    this.version += 1;
  }

  /** The kernel has left out spans before a time. */
  lacksBefore(timeS: number): void {
    this.completeSinceS = Math.max(this.completeSinceS, timeS);
  }

  /** Lanes by rank, then by track in drawing order. */
  lanes(): Lane[] {
    const order = (track: string) =>
      (TRACKS.indexOf(track) + TRACKS.length + 1) % (TRACKS.length + 1);
    return [...this.lanesByKey.values()].sort(
      (a, b) => a.rank - b.rank || order(a.track) - order(b.track),
    );
  }

  nameOf(name: number): string {
    return this.names[name] ?? "other";
  }

  /** The name whose time is summed in a slot. */
  nameOfSlot(slot: number): string {
    const name = this.slotNames[slot];
    return slot === OTHER_SLOT || name === undefined ? "other" : this.nameOf(name);
  }

  /** The slot for the sums of a name; late names share the last one. */
  readonly slotOf = (name: number): number => {
    const known = this.slots[name];
    if (known !== undefined) return known;
    const isFull = this.slotNames.length >= OTHER_SLOT || name === OTHER_NAME;
    const slot = isFull ? OTHER_SLOT : this.slotNames.push(name) - 1;
    this.slots[name] = slot;
    return slot;
  };

  private laneOf(rank: number, track: string): Lane {
    const make = () => new Lane(rank, track, this.slotOf);
    return valueAt(this.lanesByKey, `${rank} ${track}`, make);
  }

  /** Drops spans that began before some time, in all lanes, if there are too many. */
  private dropOldest(): void {
    const n = this.n;
    if (n <= this.mostSpans) return;
    const n_over = n - this.mostSpans * (1 - DROPPED_SHARE);
    const rows = [...this.lanesByKey.values()].flatMap((lane) => lane.rows);
    const cutS = cutFor(rows, n_over, this.endS);
    for (const row of rows) {
      row.dropFirst(row.countBefore(cutS));
    }
    this.lacksBefore(cutS);
  }
}

/** A time before which at least about `n` spans began. */
function cutFor(rows: readonly Row[], n: number, endS: number): number {
  let [low, high] = [0, endS + 1];
  for (let i = 0; i < 60 && high - low > 1e-6; i++) {
    const middle = (low + high) / 2;
    const count = rows.reduce((sum, row) => sum + row.countBefore(middle), 0);
    if (count < n) low = middle;
    else high = middle;
  }
  return high;
}
