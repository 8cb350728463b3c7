import { clamp, type Range, zoom } from "../range";
import { LEAST_S } from "./geometry";

/** What part of the run is looked at. */
export type Look =
  /** All of it, however long it gets. */
  | { kind: "whole" }
  /** The last so many seconds. */
  | { kind: "live"; widthS: number }
  /** Where the reader went. */
  | { kind: "free"; range: Range };

/** The times that a look shows when the run reaches until `endS`. */
export function rangeOf(look: Look, endS: number): Range {
  const end = Math.max(endS, LEAST_S);
  if (look.kind === "whole") return [0, end];
  if (look.kind === "free") return look.range;
  return [Math.max(0, end - look.widthS), Math.max(end, look.widthS)];
}

/** What is looked at after a zoom: one who follows and keeps to the right edge goes on following. */
export function zoomed(
  look: Look,
  atS: number,
  factor: number,
  endS: number,
  isLive: boolean,
): Look {
  const before = rangeOf(look, endS);
  const isAtEdge = before[1] - atS < 0.05 * (before[1] - before[0]);
  const range = zoom(before, atS, factor, [0, Math.max(endS, before[1])], LEAST_S);
  if (isLive && isAtEdge && look.kind !== "free") {
    return { kind: "live", widthS: range[1] - range[0] };
  }
  return free(range, endS);
}

/** All of the run again when that is what is left to see. */
export function free(range: Range, endS: number): Look {
  const inside = clamp(range, [0, Math.max(endS, range[1] - range[0], LEAST_S)]);
  const isAll = inside[1] - inside[0] >= endS * 0.999;
  return isAll ? { kind: "whole" } : { kind: "free", range: inside };
}
