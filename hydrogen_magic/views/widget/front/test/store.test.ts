import { describe, expect, test } from "vitest";
import { MAX_LINES, Store } from "../src/store";
import { packCurve, packSpans } from "./data";
import { deltaWith, gangWith, lineOf, packed, rankWith, stacksOf } from "./kernel";

function storeAt(clock = { ms: 0 }) {
  const frames: (() => void)[] = [];
  const store = new Store(
    "me",
    () => clock.ms,
    (paint) => void frames.push(paint),
  );
  return { store, clock, frames };
}

const bytes = (...numbers: number[]) => new DataView(packed(Uint8Array.from(numbers)));

describe("what is applied", () => {
  test("rows replace those of the same rank, and others stay", () => {
    const { store } = storeAt();
    store.apply(deltaWith(1, { gang: gangWith(), ranks: [rankWith(0), rankWith(1)] }), []);
    store.apply(deltaWith(2, { ranks: [rankWith(1, { steps: 9 })] }), []);
    expect([...store.ranks.values()].map((row) => row.steps)).toEqual([0, 9]);
    expect(store.gang?.id).toBe("amber-fox");
  });

  test("deltas that follow each other have no gap, whatever the first one's number", () => {
    const { store } = storeAt();
    expect(store.apply(deltaWith(40), [])).toBe("applied");
    expect(store.apply(deltaWith(41), [])).toBe("applied");
  });

  test("a gap is told, and what comes after it is applied all the same", () => {
    const { store } = storeAt();
    store.apply(deltaWith(1), []);
    expect(store.apply(deltaWith(3, { lines: [lineOf(0, "after")] }), [])).toBe("gap");
    expect(store.lines.map((line) => line[2])).toEqual(["after"]);
    expect(store.apply(deltaWith(4), [])).toBe("applied");
  });

  test("names that follow a lost message keep their index", () => {
    const { store } = storeAt();
    store.apply(deltaWith(1, { names: ["loading"] }), []);
    expect(store.apply(deltaWith(3, { names: ["checkpoint"], names_at: 3 }), [])).toBe("gap");
    const names = [0, 1, 2, 3].map((k) => store.spans.nameOf(k));
    expect(names).toEqual(["loading", "other", "other", "checkpoint"]);
  });

  test("a page that opens after two profiles has the range of the last one", () => {
    const { store } = storeAt();
    const steps = [10, 11, 500, 501].map((startS) => ({
      startS,
      durationS: 0.5,
      name: 0,
      depth: 0,
    }));
    const { deltas, buffers } = packSpans([{ rank: 0, track: "profiler", spans: steps }]);
    const gang = gangWith({ profiled_since_s: 499 });
    store.apply(deltaWith(1, { full: true, gang, spans: deltas }), buffers);
    expect(store.spans.profiled).toEqual([500, 501.5]);
    store.apply(deltaWith(2, { gang: gangWith({ profiled_since_s: 600 }) }), []);
    expect(store.spans.profiled).toBeNull();
  });

  test("a full one in parts is whole when none of them is lost", () => {
    const part = (parts_left: number, more = {}) => deltaWith(7, { to: "me", parts_left, ...more });
    const applied = (...parts: ReturnType<typeof part>[]) => {
      const { store } = storeAt();
      return parts.map((one) => store.apply(one, [])).at(-1);
    };
    const first = part(2, { full: true, spans_since_s: 9 });
    expect(applied(first, part(1), part(0), deltaWith(8))).toBe("applied");
    expect(applied(first, part(0))).toBe("gap");
    expect(applied(first, part(1), deltaWith(8))).toBe("gap");
    const { store } = storeAt();
    store.apply(first, []);
    expect(store.spans.completeSinceS).toBe(9);
  });

  test("a restart makes it drop the stacks, and nothing else", () => {
    const { store } = storeAt();
    const { delta, buffers } = packCurve("loss", 1, [{ rank: 0, buckets: [] }]);
    const before = { curves: [delta], stacks: stacksOf([[0], "s"]), lines: [lineOf(0, "old")] };
    store.apply(deltaWith(1, before), buffers);
    store.apply(deltaWith(2, { restarted: true }), []);
    expect([store.curves.metrics.size, store.stacks, store.lines.length]).toEqual([1, null, 1]);
  });

  test("a curve that goes back to an earlier step replaces what the page has of it", () => {
    const { store } = storeAt();
    const bucket = (key: number) => ({ key, count: 1, mean: 1, min: 1, max: 1 });
    const first = packCurve("loss", 2, [{ rank: 0, buckets: [1, 2, 3].map(bucket), badStep: 7 }]);
    const next = packCurve("loss", 2, [{ rank: 1, buckets: [bucket(1)] }]);
    store.apply(deltaWith(1, { curves: [first.delta] }), first.buffers);
    store.apply(deltaWith(2, { curves: [{ ...next.delta, replaces: true }] }), next.buffers);
    const { series } = store.curves.metrics.get("loss") ?? { series: new Map() };
    expect([...series.keys()]).toEqual([1]);
    expect(series.get(1)?.n).toBe(1);
  });

  test("a delta that was applied already does nothing", () => {
    const { store } = storeAt();
    store.apply(deltaWith(5, { lines: [lineOf(0, "once")] }), []);
    expect(store.apply(deltaWith(5, { lines: [lineOf(0, "once")] }), [])).toBe("ignored");
    expect(store.lines).toHaveLength(1);
  });

  test("a whole one takes the place of everything, and counting goes on from it", () => {
    const { store } = storeAt();
    const before = {
      ranks: [rankWith(3)],
      lines: [lineOf(0, "old")],
      stacks: stacksOf([[0], "s"]),
    };
    store.apply(deltaWith(1, before), []);
    const whole = { full: true, to: "me", lines: [lineOf(0, "new")], lines_skipped: 7 };
    expect(store.apply(deltaWith(9, whole), [])).toBe("applied");
    expect(store.lines.map((line) => line[2])).toEqual(["new"]);
    expect([store.ranks.size, store.stacks, store.linesBefore]).toEqual([0, null, 7]);
    expect(store.apply(deltaWith(10), [])).toBe("applied");
  });

  test("what another client asked for is ignored, and its number does not count", () => {
    const { store } = storeAt();
    store.apply(deltaWith(1), []);
    expect(store.apply(deltaWith(8, { to: "you", full: true }), [])).toBe("ignored");
    expect(store.apply(deltaWith(2), [])).toBe("applied");
  });

  test("the summary's columns are the three thirds of its buffer", () => {
    const { store } = storeAt();
    const summary = { counts: {}, phases: ["running"], shown: [1], chosen: [], at: 1 };
    store.apply(deltaWith(1, { summary }), [bytes(), bytes(0, 0, 50, 255, 1, 3)]);
    const { phase, progress, mark } = store.summary ?? {};
    expect([phase, progress, mark].map((column) => [...(column ?? [])])).toEqual([
      [0, 0],
      [50, 255],
      [1, 3],
    ]);
  });

  test("a summary takes away the rows that are no longer sent", () => {
    const { store } = storeAt();
    store.apply(deltaWith(1, { ranks: [rankWith(0), rankWith(1)] }), []);
    const summary = { counts: {}, phases: ["running"], shown: [1], chosen: [], at: 0 };
    store.apply(deltaWith(2, { summary }), [bytes(0, 0, 50, 255, 1, 3)]);
    expect([...store.ranks.keys()]).toEqual([1]);
  });

  test("a rank that is no longer chosen loses its curve, which is no longer sent", () => {
    const { store } = storeAt();
    const bucket = { key: 0, count: 1, mean: 1, min: 1, max: 1 };
    const { delta, buffers } = packCurve("loss", 1, [
      ...[-1, 0, 1, 2, 3].map((rank) => ({ rank, buckets: [bucket] })),
      { rank: 4, buckets: [bucket], badStep: 7 },
    ]);
    store.apply(deltaWith(1, { curves: [delta] }), buffers);
    [[0, 1, 2, 3, 4], [3]].forEach((chosen, k) => {
      const summary = { counts: {}, phases: ["running", "failed"], shown: [], chosen, at: 0 };
      const failed = bytes(0, 0, 1, 0, 0, ...new Array<number>(10).fill(0));
      store.apply(deltaWith(2 + k, { summary }), [failed]);
    });
    const { series } = store.curves.metrics.get("loss") ?? {};
    expect([...(series?.entries() ?? [])].map(([rank, b]) => [rank, b.n, b.badStep])).toEqual([
      [-1, 1, null],
      [0, 1, null],
      [2, 1, null],
      [3, 1, null],
      [4, 0, 7],
    ]);
  });

  test("a rank that was chosen and left in this page loses its curve, too", () => {
    const { store } = storeAt();
    const bucket = { key: 0, count: 1, mean: 1, min: 1, max: 1 };
    const { delta, buffers } = packCurve("loss", 1, [{ rank: 5, buckets: [bucket] }]);
    store.apply(deltaWith(1, { curves: [delta] }), buffers);
    [[5], []].forEach((chosen, k) => {
      // As a click does, before the kernel knows of it.
      if (store.summary) store.summary.chosen = chosen;
      const summary = { counts: {}, phases: ["running"], shown: [], chosen, at: 0 };
      store.apply(deltaWith(2 + k, { summary }), [bytes(...new Array<number>(18).fill(0))]);
    });
    expect(store.curves.metrics.get("loss")?.series.get(5)?.n ?? 0).toBe(0);
  });

  test("a message without a time sets no clock back", () => {
    const { store, clock } = storeAt();
    store.apply(deltaWith(1, { now_s: 100 }), []);
    clock.ms += 900;
    store.heard();
    expect(store.nowS()).toBeCloseTo(100.9);
    expect(store.silenceS()).toBe(0);
  });

  test("a summary without its buffer is an error that names the buffer", () => {
    const { store } = storeAt();
    const summary = { counts: {}, phases: [], shown: [], chosen: [], at: 2 };
    expect(() => store.apply(deltaWith(1, { summary }), [])).toThrow("no buffer 2");
  });

  test("the last lines are kept and those before them counted", () => {
    const { store } = storeAt();
    const lines = Array.from({ length: 900 }, (_, k) => lineOf(0, String(k)));
    for (let seq = 1; seq <= 10; seq++) store.apply(deltaWith(seq, { lines }), []);
    expect(store.lines.length).toBeGreaterThanOrEqual(MAX_LINES);
    expect(store.lines.length).toBeLessThan(MAX_LINES + 900);
    expect(store.linesBefore + store.lines.length).toBe(9000);
    expect(store.lines.at(-1)?.[2]).toBe("899");
  });
});

describe("who is told", () => {
  test("many changes are one call per frame", () => {
    const { store, frames } = storeAt();
    let n_calls = 0;
    store.subscribe(() => void n_calls++);
    for (let seq = 1; seq <= 5; seq++) store.apply(deltaWith(seq), []);
    expect(frames).toHaveLength(1);
    frames[0]?.();
    expect(n_calls).toBe(1);
    store.apply(deltaWith(6), []);
    expect(frames).toHaveLength(2);
  });

  test("nobody is called who went away", () => {
    const { store, frames } = storeAt();
    const end = store.subscribe(() => expect.unreachable());
    store.apply(deltaWith(1), []);
    end();
    frames[0]?.();
  });
});

describe("time", () => {
  test("goes on between messages, and stands still after the end", () => {
    const { store, clock } = storeAt();
    store.apply(deltaWith(1, { now_s: 10, gang: gangWith() }), []);
    clock.ms = 2500;
    expect(store.nowS()).toBeCloseTo(12.5);
    expect(store.silenceS()).toBeCloseTo(2.5);
    store.apply(deltaWith(2, { now_s: 13, gang: gangWith({ state: "done", ended_s: 12.75 }) }), []);
    clock.ms = 60_000;
    expect(store.nowS()).toBe(12.75);
    expect(store.isOver).toBe(true);
  });
});
