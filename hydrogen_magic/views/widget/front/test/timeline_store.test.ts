import { describe, expect, it } from "vitest";
import { Bins, MOST_BINS, SLOTS } from "../src/timeline/bins";
import { ENOUGH_FOR_BINS, Row } from "../src/timeline/row";
import { type Lane, SpanStore } from "../src/timeline/store";
import { packSpans, random, type Span } from "./data";

function storeOf(spans: readonly Span[], chunks: number, seed: number, most?: number): SpanStore {
  const next = random(seed);
  const store = most === undefined ? new SpanStore() : new SpanStore(most);
  store.apply(["a", "b", "c"], [], []);
  const cuts = Array.from({ length: chunks - 1 }, () => Math.floor(next() * spans.length));
  const bounds = [0, ...cuts.sort((a, b) => a - b), spans.length];
  for (let k = 0; k < chunks; k++) {
    const part = spans.slice(bounds[k], bounds[k + 1]);
    const { deltas, buffers } = packSpans([{ rank: 0, track: "spans", spans: part }]);
    store.apply([], deltas, buffers);
  }
  return store;
}

/** Spans of three depths that lie beside each other, inner before outer as ranks send them. */
function nested(n: number, seed: number): Span[] {
  const next = random(seed);
  const spans: Span[] = [];
  for (let k = 0; k < n; k++) {
    const length = 0.25 + next() / 2;
    for (let depth = 2; depth >= 0; depth--) {
      const startS = k + depth / 64;
      spans.push({ startS, durationS: length / 2 ** depth, name: Math.floor(next() * 3), depth });
    }
  }
  return spans;
}

const lane = (store: SpanStore) => store.lanes()[0] as Lane;

const rowOf = (spans: readonly Span[]) => {
  const row = new Row((name) => name);
  const sorted = [...spans].sort((a, b) => a.startS - b.startS);
  row.insert([
    Float64Array.from(sorted, (s) => s.startS),
    Float32Array.from(sorted, (s) => s.durationS),
    Uint16Array.from(sorted, (s) => s.name),
  ]);
  return row;
};

describe("the store of spans", () => {
  it("has rows by depth sorted by start, whatever comes in whatever chunks", () => {
    for (let seed = 0; seed < 20; seed++) {
      const next = random(seed + 100);
      const spans = nested(60, seed).sort(
        (a, b) => a.startS + 6 * next() - (b.startS + 6 * next()),
      );
      const { rows } = lane(storeOf(spans, 9, seed));
      expect(rows.length).toBe(3);
      rows.forEach((row, depth) => {
        const wanted = spans.filter((s) => s.depth === depth).sort((a, b) => a.startS - b.startS);
        expect([...row.starts.subarray(0, row.n)]).toEqual(wanted.map((s) => s.startS));
        expect([...row.names.subarray(0, row.n)]).toEqual(wanted.map((s) => s.name));
      });
    }
  });

  it("drops the oldest of all lanes alike when there are too many, and says so", () => {
    const store = storeOf(nested(500, 1), 30, 1, 600);
    expect(store.n).toBeLessThanOrEqual(600);
    expect(store.n).toBeGreaterThan(450);
    for (const row of lane(store).rows) {
      expect(row.startS).toBeGreaterThanOrEqual(store.completeSinceS);
      expect(row.n).toBeGreaterThan(100);
    }
    expect(store.endS).toBeGreaterThan(499);
  });

  it("orders lanes by rank and then as they are drawn", () => {
    const store = new SpanStore();
    const lanes = ["profiler", "mine", "spans", "phases"].flatMap((track) =>
      [1, 0].map((rank) => ({ rank, track, spans: nested(1, 1) })),
    );
    const { deltas, buffers } = packSpans(lanes);
    store.apply([], deltas, buffers);
    expect(store.lanes().map(({ rank, track }) => `${rank} ${track}`)).toEqual([
      "0 phases",
      "0 spans",
      "0 profiler",
      "0 mine",
      "1 phases",
      "1 spans",
      "1 profiler",
      "1 mine",
    ]);
  });

  it("gives names a slot each as long as there are any", () => {
    const store = new SpanStore();
    const names = Array.from({ length: 40 }, (_, k) => `name ${k}`);
    store.apply(names, [], []);
    const told = names.map((_, k) => store.nameOfSlot(store.slotOf(k)));
    expect(told.slice(0, SLOTS - 1)).toEqual(names.slice(0, SLOTS - 1));
    expect(new Set(told.slice(SLOTS - 1))).toEqual(new Set(["other"]));
    expect(store.nameOf(65535)).toBe("other");
  });

  it("begins anew", () => {
    const store = storeOf(nested(5, 1), 1, 1);
    store.clear();
    expect([store.n, store.names, store.lanes(), store.endS]).toEqual([0, [], [], 0]);
  });
});

describe("a row", () => {
  it("finds what is in sight, also where spans of two threads overlap", () => {
    const next = random(5);
    const spans = Array.from({ length: 300 }, () => ({
      startS: next() * 100,
      durationS: next() < 0.05 ? 20 : Math.fround(next()),
      name: 0,
      depth: 0,
    }));
    const row = rowOf(spans);
    const sorted = [...spans].sort((a, b) => a.startS - b.startS);
    for (let k = 0; k < 200; k++) {
      const fromS = next() * 110 - 5;
      const untilS = fromS + next() * 10;
      const [first, last] = row.between(fromS, untilS);
      sorted.forEach((s, i) => {
        const isSeen = s.startS < untilS && s.startS + s.durationS > fromS;
        if (isSeen) expect(i >= first && i < last).toBe(true);
      });
      const over = sorted.findLastIndex((s) => s.startS <= fromS && s.startS + s.durationS > fromS);
      expect(row.at(fromS)).toBe(over);
    }
  });

  it("sums up the same from bins as span by span", () => {
    const spans = Array.from({ length: ENOUGH_FOR_BINS + 100 }, (_, k) => ({
      startS: k / 512,
      durationS: (1 + (k % 3)) / 2048,
      name: k % 3,
      depth: 0,
    }));
    const binned = rowOf(spans);
    const parts = [
      rowOf(spans.slice(0, 2000)),
      rowOf(spans.slice(2000, 4000)),
      rowOf(spans.slice(4000)),
    ];
    const [got, wanted] = [new Float64Array(20 * SLOTS), new Float64Array(20 * SLOTS)];
    binned.addTo(got, 1, 0.25, 20);
    for (const part of parts) part.addTo(wanted, 1, 0.25, 20);
    got.forEach((seconds, i) => {
      expect(seconds).toBeCloseTo(wanted[i] as number, 5);
    });
    const whole = new Float64Array(SLOTS);
    binned.addTo(whole, 0, 16, 1);
    const total = spans.reduce((sum, s) => sum + s.durationS, 0);
    expect(whole.reduce((a, b) => a + b)).toBeCloseTo(total, 3);
  });

  it.each([
    [ENOUGH_FOR_BINS + 1, 4000],
    [4000, 3000],
    [4000, 4000],
  ])("still knows from afar what it had to drop of %i spans", (length, n_dropped) => {
    const spans = Array.from({ length }, (_, k) => ({
      startS: k / 256,
      durationS: 1 / 512,
      name: 0,
      depth: 0,
    }));
    const row = rowOf(spans);
    row.dropFirst(n_dropped);
    const sums = new Float64Array(SLOTS);
    row.addTo(sums, 0, 8, 1);
    expect(sums[0]).toBeCloseTo(Math.min(8, length / 256) / 2, 3);
  });
});

describe("bins", () => {
  it("become wider and lose no second", () => {
    const bins = new Bins();
    const next = random(9);
    let total = 0;
    for (let k = 0; k < 400; k++) {
      const length = Math.fround(next() * 3);
      bins.add(k * 3, length, k % 4);
      total += length;
    }
    expect(bins.widthS * MOST_BINS).toBeGreaterThanOrEqual(1200);
    const sums = new Float64Array(SLOTS);
    bins.addTo(sums, 0, 2048, 1);
    expect(sums.reduce((a, b) => a + b)).toBeCloseTo(total, 1);
  });

  it("count in part at the ends", () => {
    const bins = new Bins();
    bins.add(0, 1000, 2);
    const sums = new Float64Array(2 * SLOTS);
    bins.addTo(sums, 10.01, 0.3, 2);
    expect(sums[2]).toBeCloseTo(0.3, 4);
    expect(sums[SLOTS + 2]).toBeCloseTo(0.3, 4);
  });
});
