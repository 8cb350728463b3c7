import type { Range } from "../range";

/** Maps times to positions on the canvas, in CSS pixels. */
export interface Scale {
  range: Range;
  leftPx: number;
  widthPx: number;
}

export const toX = ({ range, leftPx, widthPx }: Scale, timeS: number): number =>
  leftPx + ((timeS - range[0]) / (range[1] - range[0])) * widthPx;

export const toTime = ({ range, leftPx, widthPx }: Scale, x: number): number =>
  range[0] + ((x - leftPx) / widthPx) * (range[1] - range[0]);

export const pxPerS = ({ range, widthPx }: Scale): number => widthPx / (range[1] - range[0]);

/** The maximum zoom: one microsecond across the canvas. */
export const LEAST_S = 1e-6;

export interface Tick {
  timeS: number;
  label: string;
}

const LEAST_TICK_PX = 84;

/** Distance of ticks: 1, 2 or 5 times a power of ten; divisions of clocks from a minute on. */
export function tickStep(spanS: number, widthPx: number): number {
  const least = (spanS / widthPx) * LEAST_TICK_PX;
  for (const s of [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400]) {
    if (least > 30 && s >= least) return s;
  }
  const power = 10 ** Math.floor(Math.log10(least));
  return power * (least <= power ? 1 : least <= 2 * power ? 2 : least <= 5 * power ? 5 : 10);
}

/** Round times in the visible range, labelled in the unit that suits the last of them. */
export function ticks({ range, widthPx }: Scale): Tick[] {
  const step = tickStep(range[1] - range[0], widthPx);
  const first = Math.ceil(range[0] / step - 1e-9);
  const last = Math.floor(range[1] / step + 1e-9);
  const found: Tick[] = [];
  for (let k = first; k <= last; k++) {
    found.push({ timeS: k * step, label: timeLabel(k * step, step, range[1]) });
  }
  return found;
}

/** `12 s`, `1.25 s`, `250 ms`, `3 min`: with enough digits to distinguish ticks. */
export function timeLabel(timeS: number, stepS: number, untilS: number): string {
  if (stepS >= 60) return clock(timeS);
  const [power, unit] = untilS < 2e-3 ? [-6, "µs"] : untilS < 2 ? [-3, "ms"] : [0, "s"];
  const n_decimals = Math.max(0, power - Math.floor(Math.log10(stepS) + 1e-9));
  return `${(timeS / 10 ** power).toFixed(n_decimals)} ${unit}`;
}

function clock(timeS: number): string {
  const minutes = Math.round(timeS / 60);
  const [h, m] = [Math.floor(minutes / 60), minutes % 60];
  return h > 0 ? `${h} h ${String(m).padStart(2, "0")}` : `${m} min`;
}

/** The text, cut with an ellipsis if needed; empty if not even three letters fit. */
export function fitted(text: string, roomPx: number, measure: (text: string) => number): string {
  if (measure(text) <= roomPx) return text;
  const each = measure(text) / text.length;
  for (let n = Math.min(text.length - 1, Math.floor(roomPx / each) + 1); n >= 3; n--) {
    const cut = `${text.slice(0, n)}…`;
    if (measure(cut) <= roomPx) return cut;
  }
  return "";
}
