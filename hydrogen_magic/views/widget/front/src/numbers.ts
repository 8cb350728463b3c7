/** Text forms of numbers and times. */

import { count } from "./format";

/** Four significant digits, whole numbers in full: `0.7525`, `1.2e-5`, `12,346`; words if not finite. */
export function figure(x: number): string {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3 || size >= (Number.isInteger(x) ? 1e12 : 1e7)) return exponent(x, 4);
  if (size >= 1000) return minus(count(x));
  return minus(x.toPrecision(4));
}

/** An axis label for a tick at distance `step` from the next: without digits that do not change. */
export function tickLabel(x: number, step: number): string {
  if (x === 0) return "0";
  const size = Math.abs(x);
  const isFine = Math.abs(step / 10 ** order(step) - 2.5) < 1e-6; // steps are 1, 2, 2.5 or 5
  const last = order(step) - (isFine ? 1 : 0);
  if (size < 1e-3 || size >= 1e6) return exponent(x, 1 + Math.max(0, order(x) - last));
  if (last >= 0) return minus(count(Math.round(x)));
  return minus(x.toFixed(Math.min(8, -last)));
}

const order = (x: number) => Math.floor(Math.log10(Math.abs(x)) + 1e-9);

const minus = (text: string) => text.replace("-", "−");

function exponent(x: number, n_digits: number): string {
  const parts = x.toExponential(n_digits - 1).split("e"); // numbers without final zeros and "+"
  return parts.map(Number).join("e").replaceAll("-", "−");
}

const UNITS: readonly [number, string][] = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];

/**
 * A duration, with the resolution of a profiler: `1.25 s`, `11.3 ms`, `840 µs`, `3 min 20 s`,
 * `2 h 5 min`.
 */
export function lapse(s: number): string {
  const whole = Math.round(s);
  if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  if (whole >= 60) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const rounded = Number(s.toPrecision(3)); // first, or 0.9999 s were 1000 ms
  const [size, unit] = UNITS.find(([size]) => rounded >= size) ?? ([1e-9, "ns"] as const);
  return `${Number((s / size).toPrecision(3))} ${unit}`;
}

/** A time since the launch, with enough digits to differ from one `resolution_s` later. */
export function moment(s: number, resolution_s: number): string {
  const n_decimals = Math.min(9, Math.max(0, Math.ceil(-Math.log10(Math.max(resolution_s, 1e-9)))));
  return `${s.toFixed(n_decimals)} s`;
}

/** A share of one: `48 %`, `0.4 %`. */
export function percent(share: number): string {
  const p = share * 100;
  if (p === 0 || p >= 1) return `${Math.round(p)} %`;
  return p < 0.1 ? "<0.1 %" : `${p.toFixed(1)} %`;
}
