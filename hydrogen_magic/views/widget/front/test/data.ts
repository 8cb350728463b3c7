/** A made-up training run, as the kernel would send it. */
import type { CurveDelta, SpanDelta, Tip } from "../src/protocol";
import { packed } from "./kernel";

/** A generator of numbers that is the same every time (mulberry32). */
export function random(seed: number): () => number {
  let a = seed;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

export interface Span {
  startS: number;
  durationS: number;
  name: number;
  depth: number;
}

export const NAMES = [
  "data wait",
  "forward",
  "backward",
  "all_reduce",
  "optimizer",
  "checkpoint",
  "waiting",
  "starting",
  "loading",
  "running",
  "augment",
  "evaluate",
];

/** Steps of about 11 ms; rank 2 is slow to get its data, and the others wait for it. */
export function trainingSpans(rank: number, n_steps: number, startS = 2.4, seed = 7): Span[] {
  const noise = random(seed + rank);
  const spans: Span[] = [];
  let at = startS + 0.02 * noise();
  const add = (name: string, ms: number, depth = 0) => {
    spans.push({ startS: at, durationS: ms / 1000, name: NAMES.indexOf(name), depth });
    if (depth === 0) at += ms / 1000;
  };
  for (let step = 0; step < n_steps; step++) {
    const isSlow = rank === 2;
    const waitMs = (isSlow ? 2.6 : 0.8) * (0.7 + 0.6 * noise());
    if (isSlow) add("augment", waitMs * 0.6, 1);
    add("data wait", waitMs);
    at += 0.00005;
    add("forward", 2.6 + 0.5 * noise());
    add("backward", 5 + 0.6 * noise());
    add("all_reduce", (isSlow ? 0.5 : 2.2) * (0.7 + 0.6 * noise()));
    add("optimizer", 0.7 + 0.1 * noise());
    if (step % 400 === 399) add("checkpoint", rank === 0 ? 260 : 4);
    at += 0.0003 * noise();
  }
  return spans;
}

export function phaseSpans(rank: number): Span[] {
  const name = (word: string) => NAMES.indexOf(word);
  return [
    { startS: 0, durationS: 0.12, name: name("waiting"), depth: 0 },
    { startS: 0.12, durationS: 0.3, name: name("starting"), depth: 0 },
    { startS: 0.42, durationS: 1.9 + 0.03 * rank, name: name("loading"), depth: 0 },
  ];
}

/** One message's columns for some lanes. */
export function packSpans(lanes: readonly { rank: number; track: string; spans: Span[] }[]) {
  const buffers: DataView[] = [];
  const deltas: SpanDelta[] = lanes.map(({ rank, track, spans }) => {
    const columns = packed(
      Float64Array.from(spans, (s) => s.startS),
      Float32Array.from(spans, (s) => s.durationS),
      Uint16Array.from(spans, (s) => s.name),
      Uint8Array.from(spans, (s) => s.depth),
    );
    const at = buffers.push(new DataView(columns)) - 1;
    return { rank, track, n: spans.length, skipped: 0, at };
  });
  return { deltas, buffers };
}

export interface Bucket {
  key: number;
  count: number;
  mean: number;
  min: number;
  max: number;
}

/** One message's columns for the curves of a metric. */
export function packCurve(
  metric: string,
  width: number,
  series: readonly { rank: number; buckets: readonly Bucket[]; badStep?: number }[],
  tip: Tip = { step: 0, mean: 1, end: null },
) {
  const fields = ["key", "count", "mean", "min", "max"] as const;
  const columns = series.flatMap(({ buckets }) =>
    fields.map((field) => Float64Array.from(buckets, (b) => b[field])),
  );
  const delta: CurveDelta = {
    metric,
    width,
    series: series.map(({ rank, buckets, badStep }) => ({
      rank,
      n: buckets.length,
      ...(badStep === undefined ? {} : { bad_step: badStep }),
    })),
    at: 0,
    tip,
  };
  return { delta, buffers: [new DataView(packed(...columns))] };
}

/** Buckets of points, as the kernel makes them. */
export function bucketsOf(points: readonly (readonly [number, number])[], width: number): Bucket[] {
  const byKey = new Map<number, number[]>();
  for (const [step, value] of points) {
    const key = Math.floor(step / width);
    const mine = byKey.get(key);
    if (mine) mine.push(value);
    else byKey.set(key, [value]);
  }
  return [...byKey]
    .sort((a, b) => a[0] - b[0])
    .map(([key, values]) => ({
      key,
      count: values.length,
      mean: values.reduce((a, b) => a + b, 0) / values.length,
      min: Math.min(...values),
      max: Math.max(...values),
    }));
}
