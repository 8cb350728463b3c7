import { num } from "../columns";
import type { Range } from "../range";
import { SLOTS } from "./bins";
import type { Row } from "./row";
import { type Lane, PHASES, type SpanStore } from "./store";

export interface Share {
  name: string;
  seconds: number;
  /** Share of the recorded time. */
  share: number;
}

/**
 * Time shares of one rank. The rule, which `span_tracks.py` shares so that the static picture
 * matches for the whole run: the spans of a rank's first track with any are summed, at the
 * outermost depth with more than one name; shares refer to the visible part of the time from the
 * first to the last moment of that track.
 */
export interface RankShares {
  rank: number;
  recordedS: number;
  shares: Share[];
  /**
   * Names of its other tracks, whose spans are concurrent with those: collectives during backward.
   */
  beside: Share[];
}

/** A row with time shares, and the range that contains all of it. */
interface Told {
  row: Row;
  lane: Lane;
}

/** If one name encloses everything ("step"), the time is that of its parts. */
export function rowOfTime(lanes: readonly Lane[]): Told | null {
  const lane = lanes.find((lane) => lane.track !== PHASES && lane.rows.some((row) => row.n > 0));
  if (lane === undefined) return null;
  const telling = lane.rows.find((row) => row.namesSeen.size > 1);
  const row = telling ?? lane.rows.find((row) => row.n > 0);
  return row === undefined ? null : { row, lane };
}

/** The part of a range in which a track was recorded; null if there is none. */
export function recordedIn(lane: Lane, range: Range): Range | null {
  const from = Math.max(range[0], lane.firstS);
  const until = Math.min(range[1], lane.endS);
  return until > from ? [from, until] : null;
}

const sums = new Float64Array(SLOTS);

/** Seconds of each slot in `lengthS` from `fromS` on; overwritten by the next call. */
export function secondsIn(rows: readonly Row[], fromS: number, lengthS: number): Float64Array {
  sums.fill(0);
  for (const row of rows) row.addTo(sums, fromS, lengthS, 1);
  return sums;
}

/** Time shares of a rank between two times; null if nothing was recorded. */
export function rankShares(
  store: SpanStore,
  rank: number,
  lanes: readonly Lane[],
  range: Range,
): RankShares | null {
  const told = rowOfTime(lanes);
  if (told === null) return null;
  const recorded = recordedIn(told.lane, range);
  if (recorded === null) return null;
  const [from, until] = recorded;
  const recordedS = until - from;
  const others = lanes.filter((lane) => lane !== told.lane && lane.track !== PHASES);
  const outermost = others.flatMap((lane) => lane.rows.slice(0, 1));
  const shares = named(store, secondsIn([told.row], from, recordedS), recordedS);
  const beside = named(store, secondsIn(outermost, from, recordedS), recordedS);
  return { rank, recordedS, shares, beside };
}

/** The names with any time, most first. */
export function named(store: SpanStore, seconds: Float64Array, wholeS: number): Share[] {
  const shares: Share[] = [];
  for (let slot = 0; slot < SLOTS; slot++) {
    const s = num(seconds, slot);
    if (s > 0) shares.push({ name: store.nameOfSlot(slot), seconds: s, share: s / wholeS });
  }
  return shares.sort((a, b) => b.seconds - a.seconds);
}

/**
 * All ranks together, the name with the most time first. Spans of other tracks are a share of the time of
 * the ranks that have them: Horovod's coordinator records negotiations of all ranks on rank 0.
 */
export function gangShares(
  ranks: readonly RankShares[],
  which: "shares" | "beside" = "shares",
): Share[] {
  const whole = ranks.reduce((sum, rank) => sum + rank.recordedS, 0);
  const seconds = new Map<string, [number, number]>();
  for (const rank of ranks) {
    for (const { name, seconds: s } of rank[which]) {
      const [spent, of] = seconds.get(name) ?? [0, 0];
      seconds.set(name, [spent + s, of + rank.recordedS]);
    }
  }
  return [...seconds]
    .map(([name, [s, of]]) => ({ name, seconds: s, share: s / (which === "beside" ? of : whole) }))
    .sort((a, b) => b.seconds - a.seconds);
}

/** Columns of a row seen from afar, aligned with the clock so that they do not flicker. */
export interface Columns {
  fromS: number;
  columnS: number;
  n: number;
}

/** Spans per column, so that a column covers several steps of training instead of one span. */
const SPANS_PER_COLUMN = 40;
const [LEAST_PX, MOST_PX] = [4, 40];

export function columnsFor(range: Range, widthPx: number, n_spans: number): Columns {
  const secondsPerPx = (range[1] - range[0]) / widthPx;
  const wantedPx = (SPANS_PER_COLUMN * widthPx) / Math.max(1, n_spans);
  const columnPx = Math.min(MOST_PX, Math.max(LEAST_PX, wantedPx));
  const columnS = 2 ** Math.round(Math.log2(columnPx * secondsPerPx));
  const fromS = Math.floor(range[0] / columnS) * columnS;
  return { fromS, columnS, n: Math.ceil((range[1] - fromS) / columnS) };
}
