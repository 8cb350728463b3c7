import { describe, expect, it } from "vitest";
import { type Buckets, CurveStore } from "../src/curves/store";
import { ALL_RANKS } from "../src/protocol";
import { type Bucket, bucketsOf, packCurve, random } from "./data";

type Point = readonly [number, number];

const seen = (buckets: Buckets): Bucket[] =>
  Array.from({ length: buckets.n }, (_, i) => ({
    key: buckets.keys[i] as number,
    count: buckets.counts[i] as number,
    mean: buckets.means[i] as number,
    min: buckets.mins[i] as number,
    max: buckets.maxs[i] as number,
  }));

const series = (store: CurveStore, metric: string, rank: number) =>
  seen(store.metrics.get(metric)?.series.get(rank) as Buckets);

/** Sends what changed of `points` since they were `n_before`, in buckets of `width`. */
function send(store: CurveStore, ranks: readonly Point[][], n_before: number, width: number) {
  const changed = ranks.map((points, rank) => {
    const keys = new Set(points.slice(n_before).map(([step]) => Math.floor(step / width)));
    return { rank, buckets: bucketsOf(points, width).filter(({ key }) => keys.has(key)) };
  });
  const { delta, buffers } = packCurve("loss", width, changed);
  store.apply([delta], buffers);
}

describe("the store of curves", () => {
  it("knows the same as the kernel after any chunks and any growth of widths", () => {
    for (let seed = 0; seed < 25; seed++) {
      const next = random(seed);
      const store = new CurveStore();
      const ranks: Point[][] = [[], [], []];
      let width = 1;
      for (let chunk = 0; chunk < 15; chunk++) {
        const n_before = ranks[0]?.length as number;
        const n = 1 + Math.floor(next() * 20);
        // Sixteenths are exact, however they are averaged.
        for (const points of ranks) {
          for (let k = 0; k < n; k++) points.push([n_before + k, Math.floor(next() * 160) / 16]);
        }
        if (next() < 0.3) width *= next() < 0.3 ? 4 : 2;
        send(store, ranks, n_before, width);
      }
      ranks.forEach((points, rank) => {
        const wanted = bucketsOf(points, width);
        const found = series(store, "loss", rank);
        expect(found.map(({ key, count, min, max }) => [key, count, min, max])).toEqual(
          wanted.map(({ key, count, min, max }) => [key, count, min, max]),
        );
        found.forEach(({ mean }, i) => {
          expect(mean).toBeCloseTo(wanted[i]?.mean as number, 4);
        });
      });
    }
  });

  it("widens ranks that a message does not speak of", () => {
    const store = new CurveStore();
    const one = { key: 0, count: 1, mean: 1, min: 1, max: 1 };
    const first = packCurve("loss", 1, [
      { rank: 0, buckets: [one, { ...one, key: 1, mean: 4, min: 4, max: 4 }] },
    ]);
    store.apply([first.delta], first.buffers);
    const second = packCurve("loss", 4, [{ rank: 1, buckets: [{ ...one, key: 7 }] }]);
    store.apply([second.delta], second.buffers);
    expect(series(store, "loss", 0)).toEqual([{ key: 0, count: 2, mean: 2.5, min: 1, max: 4 }]);
    expect(store.metrics.get("loss")?.extent()).toEqual([0, 31]);
  });

  it("begins anew when widths shrink", () => {
    const store = new CurveStore();
    const bucket = { key: 3, count: 8, mean: 1, min: 0, max: 2 };
    for (const width of [8, 1]) {
      const { delta, buffers } = packCurve("loss", width, [{ rank: 0, buckets: [bucket] }]);
      store.apply([delta], buffers);
    }
    expect(store.metrics.get("loss")?.extent()).toEqual([3, 3]);
  });

  it("remembers where values stopped being finite", () => {
    const store = new CurveStore();
    const { delta, buffers } = packCurve("loss", 1, [{ rank: 1, buckets: [], badStep: 120 }]);
    store.apply([delta], buffers);
    expect(store.metrics.get("loss")?.series.get(1)?.badStep).toBe(120);
    expect(store.metrics.get("loss")?.extent()).toEqual([120, 120]);
    const finite = packCurve("loss", 1, [{ rank: 1, buckets: bucketsOf([[100, 1]], 1) }]);
    store.apply([finite.delta], finite.buffers);
    expect(store.metrics.get("loss")?.extent()).toEqual([100, 120]);
  });

  it("has a detail only for the steps it holds, and only while it is finer", () => {
    const store = new CurveStore();
    const bucket = { key: 1, count: 8, mean: 1, min: 0, max: 2 };
    const known = packCurve("loss", 8, [{ rank: ALL_RANKS, buckets: [bucket] }]);
    store.apply([known.delta], known.buffers);
    const fine = packCurve("loss", 2, [{ rank: ALL_RANKS, buckets: [{ ...bucket, key: 5 }] }]);
    const asked = { kind: "detail", to: "", id: "", from: 8, until: 16 } as const;
    store.applyDetail({ ...fine.delta, ...asked }, fine.buffers);
    expect(store.detailFor("loss", 9, 15)?.metric.width).toBe(2);
    expect(store.detailFor("loss", 7, 15)).toBeNull();
    expect(store.detailFor("accuracy", 9, 15)).toBeNull();
    store.applyDetail({ ...known.delta, ...asked }, known.buffers);
    expect(store.detailFor("loss", 9, 15)).toBeNull();
  });

  it("forgets everything", () => {
    const store = new CurveStore();
    const { delta, buffers } = packCurve("loss", 1, []);
    store.apply([delta], buffers);
    store.clear();
    expect([...store.metrics]).toEqual([]);
  });
});
