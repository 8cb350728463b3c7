import { describe, expect, it } from "vitest";
import { SLOTS } from "../src/timeline/bins";
import { columnsOf, draw } from "../src/timeline/draw";
import { toX } from "../src/timeline/geometry";
import { hit } from "../src/timeline/hit";
import { AXIS_PX, GUTTER_PX, layout, type Strip, stripAt } from "../src/timeline/layout";
import { gangShares, rankShares, rowOfTime } from "../src/timeline/shares";
import { SpanStore } from "../src/timeline/store";
import { countAll } from "../src/timeline/useShares";
import { NAMES, packSpans, phaseSpans, type Span, trainingSpans } from "./data";
import { bigStore, fakeContext, sceneOf } from "./scenes";

function storeOf(lanes: readonly { rank: number; track: string; spans: Span[] }[]): SpanStore {
  const store = new SpanStore();
  const { deltas, buffers } = packSpans(lanes);
  store.apply(NAMES, deltas, buffers);
  return store;
}

const training = (n_ranks = 2, n_steps = 400) =>
  storeOf(
    Array.from({ length: n_ranks }, (_, rank) => [
      { rank, track: "phases", spans: phaseSpans(rank) },
      { rank, track: "spans", spans: trainingSpans(rank, n_steps) },
    ]).flat(),
  );

describe("shares", () => {
  it("add up to the time that spans take", () => {
    const store = training(1);
    const [found] = countAll(store, store.lanes(), [0, store.endS]);
    const outer = trainingSpans(0, 400).filter((span) => span.depth === 0);
    const wanted = outer.reduce((sum, span) => sum + span.durationS, 0);
    expect(found?.shares.reduce((sum, { seconds }) => sum + seconds, 0)).toBeCloseTo(wanted, 3);
    expect(found?.shares[0]?.name).toBe("backward");
    expect(found?.recordedS).toBeCloseTo(store.endS - (outer[0] as Span).startS, 3);
  });

  it("of the gang are those of its ranks together", () => {
    const store = training(3);
    const ranks = countAll(store, store.lanes(), [3, 4]);
    const gang = gangShares(ranks);
    const waits = ranks.map(
      ({ shares }) => shares.find(({ name }) => name === "data wait")?.seconds,
    );
    expect(gang.find(({ name }) => name === "data wait")?.seconds).toBeCloseTo(
      waits.reduce<number>((sum, s) => sum + (s ?? 0), 0),
      6,
    );
  });

  it("of what one rank does for all are of that rank's time", () => {
    const waits = trainingSpans(0, 50).filter((s) => s.name === NAMES.indexOf("all_reduce"));
    const lanes = [0, 1].map((rank) => ({ rank, track: "spans", spans: trainingSpans(0, 50) }));
    const store = storeOf([...lanes, { rank: 0, track: "coordinator", spans: waits }]);
    const ranks = countAll(store, store.lanes(), [0, store.endS]);
    expect(gangShares(ranks, "beside")[0]?.share).toBeCloseTo(ranks[0]?.beside[0]?.share ?? 0, 6);
  });

  it("keep what lies beside apart", () => {
    const waits = trainingSpans(0, 50).filter((s) => s.name === NAMES.indexOf("all_reduce"));
    const store = storeOf([
      { rank: 0, track: "spans", spans: trainingSpans(0, 50) },
      { rank: 0, track: "collectives", spans: waits },
    ]);
    const ranks = countAll(store, store.lanes(), [0, store.endS]);
    const [beside] = gangShares(ranks, "beside");
    expect(beside?.name).toBe("all_reduce");
    const inside = gangShares(ranks).find(({ name }) => name === "all_reduce");
    expect(beside?.seconds).toBeCloseTo(inside?.seconds as number, 6);
    expect(gangShares(ranks).reduce((sum, { share }) => sum + share, 0)).toBeLessThanOrEqual(1);
  });

  it("look inside of a name that encloses everything", () => {
    const inner = trainingSpans(0, 20).map((span) => ({ ...span, depth: span.depth + 1 }));
    const step = { startS: 2, durationS: 3, name: NAMES.indexOf("evaluate"), depth: 0 };
    const store = storeOf([{ rank: 0, track: "spans", spans: [...inner, step] }]);
    const told = rankShares(store, 0, store.lanes(), [0, 5]);
    expect(told?.shares.map(({ name }) => name)).not.toContain("evaluate");
    expect(rowOfTime([])).toBeNull();
  });

  it("of columns are whole where every moment is spanned", () => {
    const spans = Array.from({ length: 4000 }, (_, k) => ({
      startS: k / 1024,
      durationS: 1 / 1024,
      name: k % 3,
      depth: 0,
    }));
    const store = storeOf([{ rank: 0, track: "spans", spans }]);
    const scene = sceneOf(store, [0.5, 3.5]);
    const columns = columnsOf(scene.layout.strips[0] as Strip, scene.scale);
    if (columns === null) throw new Error("4,000 spans on 1,000 pixels are summed up");
    const sums = new Float64Array(columns.n * SLOTS);
    store.lanes()[0]?.rows[0]?.addTo(sums, columns.fromS, columns.columnS, columns.n);
    for (let k = 0; k < columns.n - 1; k++) {
      const whole = sums.subarray(k * SLOTS, (k + 1) * SLOTS).reduce((a, b) => a + b, 0);
      expect(whole / columns.columnS).toBeCloseTo(1, 6);
    }
    expect(columns.fromS / columns.columnS).toBe(Math.round(columns.fromS / columns.columnS));
  });
});

describe("drawing", () => {
  it("writes names into boxes that are near", () => {
    const { ctx, calls } = fakeContext();
    draw(ctx, sceneOf(training(), [3, 3.03]));
    expect(calls.texts).toContain("backward");
    expect(calls.texts).toContain("rank 1");
  });

  it("draws bands and no boxes from afar, however many spans there are", () => {
    const store = bigStore(8, 50_000);
    const { ctx, calls } = fakeContext();
    draw(ctx, sceneOf(store, [0, store.endS]));
    expect(calls.rects).toBeLessThan(40);
    expect(calls.fills).toBeGreaterThanOrEqual(8 * 5);
    expect(calls.points).toBeLessThan(8 * 6 * 4 * 400);
  });

  it("shows the phase that goes on", () => {
    const store = storeOf([{ rank: 0, track: "phases", spans: phaseSpans(0) }]);
    const { ctx, calls } = fakeContext();
    draw(ctx, { ...sceneOf(store, [0, 9]), phaseOf: () => "running", endS: 9 });
    expect(calls.texts).toContain("running");
  });
});

describe("layout", () => {
  const lanes = () => training().lanes();

  it("puts ranks under each other and finds them again", () => {
    const made = layout(lanes(), new Set(), new Set());
    expect(made.labels.filter(({ isRank }) => isRank).map(({ text }) => text)).toEqual([
      "rank 0",
      "rank 1",
    ]);
    for (const strip of made.strips) expect(stripAt(made, strip.y + 1)).toBe(strip);
    expect(made.strips[0]?.y).toBe(AXIS_PX);
    expect(stripAt(made, AXIS_PX - 1)).toBeNull();
  });

  it("is lower when ranks are folded or tracks hidden", () => {
    const all = layout(lanes(), new Set(), new Set()).heightPx;
    expect(layout(lanes(), new Set([0]), new Set()).heightPx).toBeLessThan(all);
    expect(layout(lanes(), new Set(), new Set(["spans"])).heightPx).toBeLessThan(all);
  });

  it("tells the span, or the column, under the pointer", () => {
    const store = training();
    const near = sceneOf(store, [3, 3.03]);
    const strip = near.layout.strips.find((s) => s.track === "spans") as Strip;
    const row = strip.row;
    const at = row.at(3.015);
    const middle = (row.starts[at] as number) + (row.durations[at] as number) / 2;
    const found = hit(store, near.layout, near.scale, toX(near.scale, middle), strip.y + 2);
    expect(found?.title).toBe(store.nameOf(row.names[at] as number));
    expect(found?.lines[1]).toBe("rank 0 · spans");
    const far = sceneOf(store, [0, store.endS]);
    expect(hit(store, far.layout, far.scale, 800, strip.y + 2)?.title).toContain("rank 0");
    expect(hit(store, far.layout, far.scale, GUTTER_PX - 1, strip.y + 2)).toBeNull();
  });

  it("tells the share of a span in the recorded time of its rank, whatever its row covers", () => {
    const span = (name: string, startS: number, durationS: number, depth = 0): Span => ({
      startS,
      durationS,
      name: NAMES.indexOf(name),
      depth,
    });
    const nested = [span("evaluate", 0, 100), span("checkpoint", 50, 2, 1)];
    const waits = [span("all_reduce", 50, 1), span("all_reduce", 150, 10)];
    const store = storeOf([
      { rank: 0, track: "spans", spans: nested },
      { rank: 0, track: "collectives", spans: waits },
    ]);
    const told = (timeS: number, ...range: [number, number]) => {
      const { layout, scale } = sceneOf(store, range);
      const found = layout.strips.map(({ y }) => hit(store, layout, scale, toX(scale, timeS), y));
      return found.map((one) => one?.lines[2]?.split(" of ")[0]);
    };
    expect(told(50.5, 0, 200)).toEqual(["100 %", "2 %", "1 %"]);
    expect(told(50.5, 50, 60)).toEqual(["100 %", "20 %", "10 %"]);
    expect(told(155, 120, 200)).toEqual([undefined, undefined, undefined]);
  });
});
