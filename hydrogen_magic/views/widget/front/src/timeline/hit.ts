import { num } from "../columns";
import { counted } from "../format";
import { lapse, moment, percent } from "../numbers";
import { columnsOf } from "./draw";
import { pxPerS, type Scale, toTime } from "./geometry";
import { type Layout, type Strip, stripAt } from "./layout";
import { named, recordedIn, rowOfTime, secondsIn } from "./shares";
import { type Lane, PHASES, type SpanStore } from "./store";

/** The object under the pointer. */
export interface Hit {
  title: string;
  lines: string[];
}

/** Maximum distance at which a span narrower than a pixel is hit. */
const REACH_PX = 2;

export function hit(
  store: SpanStore,
  layout: Layout,
  scale: Scale,
  x: number,
  y: number,
): Hit | null {
  const strip = stripAt(layout, y);
  if (strip === null || x < scale.leftPx) return null;
  const timeS = toTime(scale, x);
  const columns = strip.track === PHASES ? null : columnsOf(strip, scale);
  if (columns === null) return hitSpan(store, strip, scale, timeS);
  const k = Math.floor((timeS - columns.fromS) / columns.columnS);
  return hitColumn(store, strip, columns.fromS + k * columns.columnS, columns.columnS);
}

function hitSpan(store: SpanStore, strip: Strip, scale: Scale, timeS: number): Hit | null {
  const { row } = strip;
  const reachS = REACH_PX / pxPerS(scale);
  const at = [timeS, timeS + reachS, timeS - reachS].map((t) => row.at(t)).find((i) => i >= 0);
  if (at === undefined) return null;
  const [startS, lengthS] = [num(row.starts, at), num(row.durations, at)];
  const where = `rank ${strip.rank} · ${strip.track}${strip.depth > 0 ? `, depth ${strip.depth}` : ""}`;
  const lines = [`${lapse(lengthS)} from ${moment(startS, lengthS / 100)}`, where];
  const share = strip.track === PHASES ? "" : shareInWords(store, strip, scale, num(row.names, at));
  if (share) lines.push(share);
  return { title: store.nameOf(num(row.names, at)), lines };
}

/** "48 % of the rank's visible time", which `rankShares` defines; empty if none was recorded. */
function shareInWords(
  store: SpanStore,
  { rank, row }: Strip,
  { range }: Scale,
  name: number,
): string {
  const told = rowOfTime(store.lanes().filter((lane) => lane.rank === rank));
  const recorded = told && recordedIn(told.lane, range);
  if (recorded === null) return "";
  const [from, until] = recorded;
  const slot = store.slotOf(name);
  const seconds = num(secondsIn([row], from, until - from), slot);
  const what = store.nameOfSlot(slot) === "other" ? "with others " : "";
  return `${what}${percent(seconds / (until - from))} of the rank's visible time`;
}

const MOST_NAMES = 5;

function hitColumn(store: SpanStore, strip: Strip, fromS: number, columnS: number): Hit | null {
  const shares = named(store, secondsIn([strip.row], fromS, columnS), columnS);
  if (shares.length === 0) return null;
  const lines = shares.slice(0, MOST_NAMES).map(({ name, share }) => `${percent(share)} ${name}`);
  return {
    title: `rank ${strip.rank} · ${lapse(columnS)} from ${moment(fromS, columnS)}`,
    lines,
  };
}

/** Description of the picture for screen readers. */
export function summary(
  store: SpanStore,
  lanes: readonly Lane[],
  shares: string,
  endS: number,
): string {
  const ranks = counted(new Set(lanes.map((lane) => lane.rank)).size, "rank");
  return `Timeline of ${ranks}, ${counted(store.n, "span")} in ${lapse(endS)}. ${shares}`;
}
