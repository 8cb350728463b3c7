import type { Figure } from "./protocol";

const pad = (n: number) => String(n).padStart(2, "0");

/** `7.4 s`, `43 s`, `2:10`, `1:02:03`, `2 d 03:04`. */
export function duration(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  const whole = Math.round(s);
  const [d, h, m] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (d > 0) return `${d} d ${pad(h)}:${pad(m)}`;
  return h > 0 ? `${h}:${pad(m)}:${pad(whole % 60)}` : `${m}:${pad(whole % 60)}`;
}

/** An estimate has no tenths: `6 s`, `2:10`. */
export const roughly = (seconds: number): string =>
  seconds < 9.95 ? `${Math.round(Math.max(0, seconds))} s` : duration(seconds);

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** `1,234,567`. */
export const count = (n: number): string => grouped.format(n);

/** `1 line`, `2,053 lines`. */
export const counted = (n: number, word: string): string =>
  `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** `1.23 GB`, in powers of 1000 as everywhere in this package. */
export function size(bytes: number): string {
  if (bytes < 1000) return `${bytes} B`;
  const units = ["kB", "MB", "GB", "TB"];
  const rounded = Number(bytes.toPrecision(3)); // first, or 999,999 B were 1000 kB
  const k = Math.min(units.length, Math.floor(Math.log10(rounded) / 3));
  const n_decimals = k >= 3 ? 2 : rounded / 1000 ** k >= 100 ? 0 : 1;
  return `${(bytes / 1000 ** k).toFixed(n_decimals)} ${units[k - 1]}`;
}

/** Rates: two or three significant digits, `0.0033`, `0.52`, `12.4`, `1,240`. */
export function rate(perS: number): string {
  if (perS > 0 && perS < 0.1) return String(Number(perS.toPrecision(2)));
  if (perS >= 100) return count(perS);
  return perS.toFixed(perS >= 10 ? 1 : 2);
}

/** Decimals such that the largest value of a column has four significant digits. */
function decimals(largest: number): number {
  return Math.min(4, Math.max(0, 3 - Math.floor(Math.log10(largest))));
}

/** Formats the values of one column alike, so that their decimal points are aligned. */
export function column(figures: readonly (Figure | undefined)[]): string[] {
  const numbers = figures.filter((f): f is number => typeof f === "number" && f !== 0);
  const largest = Math.max(...numbers.map(Math.abs), 0);
  const isExtreme = largest !== 0 && (largest >= 1e6 || largest < 1e-3);
  const areCounts = numbers.every(Number.isInteger);
  const write = (n: number) => {
    if (isExtreme && !(areCounts && largest < 1e9)) return n.toExponential(2);
    return areCounts ? count(n) : n.toFixed(decimals(largest));
  };
  return figures.map((f) => (f === undefined ? "" : typeof f === "number" ? write(f) : f));
}
