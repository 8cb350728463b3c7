import { valueAt } from "../maps";
import type { Row } from "./row";
import { type Lane, PHASES } from "./store";

export const AXIS_PX = 22;
export const GUTTER_PX = 76;
const PHASE_PX = 4;
const OUTER_PX = 20;
const INNER_PX = 14;
const FOLDED_PX = 8;
const ROW_GAP_PX = 1;
const RANK_GAP_PX = 7;
/** Deeper spans are not drawn; they are in the trace file. */
const MOST_DEPTHS = 6;

/** A row and its position. */
export interface Strip {
  rank: number;
  track: string;
  depth: number;
  row: Row;
  y: number;
  height: number;
}

/** Label at the left. */
export interface Label {
  text: string;
  y: number;
  isRank: boolean;
  /** Rank that a click folds or unfolds. */
  rank: number;
}

export interface Layout {
  strips: Strip[];
  labels: Label[];
  heightPx: number;
}

/** Stacks lanes, sorted by rank and track. */
export function layout(
  lanes: readonly Lane[],
  foldedRanks: ReadonlySet<number>,
  hiddenTracks: ReadonlySet<string>,
): Layout {
  const made: Layout = { strips: [], labels: [], heightPx: AXIS_PX };
  for (const group of byRank(lanes).values()) placeRank(made, group, foldedRanks, hiddenTracks);
  made.heightPx += 2;
  return made;
}

export function byRank(lanes: readonly Lane[]): Map<number, Lane[]> {
  const groups = new Map<number, Lane[]>();
  for (const lane of lanes) valueAt(groups, lane.rank, () => []).push(lane);
  return groups;
}

function placeRank(
  made: Layout,
  group: readonly Lane[],
  foldedRanks: ReadonlySet<number>,
  hiddenTracks: ReadonlySet<string>,
): void {
  const rank = (group[0] as Lane).rank;
  const isFolded = foldedRanks.has(rank);
  const work = group.filter((lane) => lane.track !== PHASES && lane.n > 0);
  const seen = work.filter((lane) => !hiddenTracks.has(lane.track));
  const top = made.heightPx;
  const phases = group.find((lane) => lane.track === PHASES);
  if (phases) placePhases(made, phases, work.length === 0);
  seen.forEach((lane, k) => {
    if (isFolded && k > 0) return;
    const y = made.heightPx;
    placeTrack(made, lane, isFolded);
    if (k > 0) made.labels.push({ text: lane.track, y: y + INNER_PX / 2 + 1, isRank: false, rank });
  });
  const rankY = Math.min(made.heightPx, top + OUTER_PX + PHASE_PX);
  made.labels.push({ text: `rank ${rank}`, y: (top + rankY) / 2, isRank: true, rank });
  made.heightPx = Math.max(made.heightPx, top + INNER_PX) + RANK_GAP_PX;
}

/** A thin strip over the spans; full rows with names in them if there are no spans. */
function placePhases(made: Layout, lane: Lane, isAlone: boolean): void {
  lane.rows.forEach((row, depth) => {
    if (depth > 1 || (depth === 1 && !isAlone)) return;
    place(made, lane, row, depth, isAlone ? INNER_PX : PHASE_PX);
  });
}

function placeTrack(made: Layout, lane: Lane, isFolded: boolean): void {
  lane.rows.slice(0, isFolded ? 1 : MOST_DEPTHS).forEach((row, depth) => {
    const isOuter = depth === 0 && lane.track === "spans";
    place(made, lane, row, depth, isFolded ? FOLDED_PX : isOuter ? OUTER_PX : INNER_PX);
  });
}

function place(made: Layout, lane: Lane, row: Row, depth: number, height: number): void {
  const { rank, track } = lane;
  made.strips.push({ rank, track, depth, row, y: made.heightPx, height });
  made.heightPx += height + ROW_GAP_PX;
}

/** The strip at a height; null between strips. */
export function stripAt({ strips }: Layout, y: number): Strip | null {
  return strips.find((strip) => y >= strip.y && y < strip.y + strip.height) ?? null;
}
