/** A visible range of an axis, and its changes by keys, wheel and drag. */

export type Range = readonly [from: number, until: number];

/** The range, moved or shrunk to lie within `bounds`. */
export function clamp([from, until]: Range, bounds: Range): Range {
  const width = Math.min(until - from, bounds[1] - bounds[0]);
  const start = Math.min(Math.max(from, bounds[0]), bounds[1] - width);
  return [start, start + width];
}

/** `factor` < 1 zooms in; the position of `at` is kept. */
export function zoom(
  range: Range,
  at: number,
  factor: number,
  bounds: Range,
  least: number,
): Range {
  const width = range[1] - range[0];
  const most = Math.max(least, bounds[1] - bounds[0]);
  const wanted = Math.min(Math.max(width * factor, least), most);
  const share = width > 0 ? (at - range[0]) / width : 0.5;
  const from = at - share * wanted;
  return clamp([from, from + wanted], bounds);
}

export function pan([from, until]: Range, by: number, bounds: Range): Range {
  return clamp([from + by, until + by], bounds);
}

export const middle = ([from, until]: Range): number => (from + until) / 2;

const KEY_FACTOR = 0.6;
const KEY_PAN = 0.2;

/** The effect of a key on the range; "whole" for all there is; null for other keys. */
export function byKey(key: string, range: Range, bounds: Range, least: number) {
  const width = range[1] - range[0];
  if (key === "ArrowLeft") return pan(range, -KEY_PAN * width, bounds);
  if (key === "ArrowRight") return pan(range, KEY_PAN * width, bounds);
  if (key === "+" || key === "=") return zoom(range, middle(range), KEY_FACTOR, bounds, least);
  if (key === "-" || key === "_") return zoom(range, middle(range), 1 / KEY_FACTOR, bounds, least);
  return key === "0" ? "whole" : null;
}
