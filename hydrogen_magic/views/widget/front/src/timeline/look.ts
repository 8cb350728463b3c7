import { clamp, type Range, zoom } from "../range";
import { LEAST_S } from "./geometry";

/** The visible part of the run. */
export type Look =
  /** All of it, also while it grows. */
  | { kind: "whole" }
  /** The last seconds, in this number. */
  | { kind: "live"; widthS: number }
  /** A range chosen by the user. */
  | { kind: "free"; range: Range };

/** The times that a look shows if the run lasts until `endS`. */
export function rangeOf(look: Look, endS: number): Range {
  const end = Math.max(endS, LEAST_S);
  if (look.kind === "whole") return [0, end];
  if (look.kind === "free") return look.range;
  return [Math.max(0, end - look.widthS), Math.max(end, look.widthS)];
}

/**
 * The look after a zoom: if the user was following and kept the right edge, following continues.
 */
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

/** All of the run, if that is the result of a zoom out. */
export function free(range: Range, endS: number): Look {
  const inside = clamp(range, [0, Math.max(endS, range[1] - range[0], LEAST_S)]);
  const isAll = inside[1] - inside[0] >= endS * 0.999;
  return isAll ? { kind: "whole" } : { kind: "free", range: inside };
}
