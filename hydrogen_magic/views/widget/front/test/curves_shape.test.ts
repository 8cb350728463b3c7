import { describe, expect, it } from "vitest";
import { columnsFor, wholeOf } from "../src/curves/Curves";
import { airy, isolated, logLabels, logTicks, stepLabel } from "../src/curves/plot";
import { FEW_LINES, firstBad, type Options, shape, smooth } from "../src/curves/shape";
import { CurveStore, type Metric } from "../src/curves/store";
import { wantedDetail } from "../src/curves/useDetail";
import { readAt, readLast } from "../src/curves/values";
import { figure, lapse, moment, percent, tickLabel } from "../src/numbers";
import { ALL_RANKS, type Tip } from "../src/protocol";
import { bucketsOf, packCurve } from "./data";
import { rankWith } from "./kernel";

type Points = readonly (readonly [number, number])[];

/** Points at the steps 0, 1, 2, ... */
const points = (...values: number[]): Points => values.map((value, step) => [step, value]);

function metricOf(
  ranks: Record<number, Points>,
  width = 1,
  badSteps: Record<number, number> = {},
  tip?: Tip,
): Metric {
  const store = new CurveStore();
  const all = { [ALL_RANKS]: Object.values(ranks).flat(), ...ranks };
  const series = Object.entries(all).map(([rank, points]) => {
    const badStep = badSteps[Number(rank)];
    const bucketed = { rank: Number(rank), buckets: bucketsOf(points, width) };
    return badStep === undefined ? bucketed : { ...bucketed, badStep };
  });
  const { delta, buffers } = packCurve("loss", width, series, tip);
  store.apply([delta], buffers);
  return store.metrics.get("loss") as Metric;
}

const PLAIN: Options = { mode: "both", smoothing: 0, isLog: false };
const TWO: Record<number, Points> = {
  [ALL_RANKS]: [
    [0, 1],
    [0, 3],
    [1, 2],
    [2, 5],
  ],
  0: [
    [0, 1],
    [1, 2],
  ],
  1: [
    [0, 3],
    [2, 5],
  ],
};

describe("lines of a plot", () => {
  it("are over common steps, with gaps where a rank logged nothing", () => {
    const made = shape(metricOf(TWO), PLAIN);
    expect(made.lines.map(({ role, rank }) => [role, rank])).toEqual([
      ["high", ALL_RANKS],
      ["low", ALL_RANKS],
      ["halo", ALL_RANKS],
      ["rank", 0],
      ["rank", 1],
    ]);
    expect(made.steps).toEqual([0, 1, 2]);
    expect(made.values.map((values) => [...values])).toEqual([
      [3, 2, 5],
      [1, 2, 5],
      [2, 2, 5],
      [1, 2, undefined],
      [3, undefined, 5],
    ]);
  });

  it("stand in the middle of wide buckets", () => {
    expect(
      shape(
        metricOf(
          {
            0: [
              [0, 1],
              [5, 2],
            ],
          },
          4,
        ),
        PLAIN,
      ).steps,
    ).toEqual([1.5, 5.5]);
  });

  it("are those asked for", () => {
    const roles = (mode: Options["mode"]) =>
      shape(metricOf(TWO), { ...PLAIN, mode }).lines.map(({ role }) => role);
    expect(roles("mean")).toEqual(["high", "low", "mean"]);
    expect(roles("ranks")).toEqual(["rank", "rank"]);
  });

  it("are those of ranks over the mean while they are few, under it when they are many", () => {
    const roles = (n_ranks: number) => {
      const ranks = Array.from({ length: n_ranks }, (_, rank) => [rank, [[0, rank]]] as const);
      const all = ranks.map(([rank]) => [0, rank] as const);
      const metric = metricOf({ ...Object.fromEntries(ranks), [ALL_RANKS]: all });
      return shape(metric, PLAIN).lines.map(({ role }) => role);
    };
    expect(roles(FEW_LINES).slice(2, 4)).toEqual(["halo", "rank"]);
    expect(roles(FEW_LINES + 1).slice(-2)).toEqual(["rank", "mean"]);
  });

  it("are those of ranks with a curve, however many have only values that are not finite", () => {
    const n_ranks = 64;
    const bad = Array.from({ length: n_ranks }, (_, rank) => [rank, []] as const);
    const badSteps = Object.fromEntries(bad.map(([rank]) => [rank, 5]));
    const finite: Record<number, Points> = { 0: [[0, 1]], 60: [[0, 2]], [ALL_RANKS]: [[0, 3]] };
    const metric = metricOf({ ...Object.fromEntries(bad), ...finite }, 1, badSteps);
    const lines = shape(metric, PLAIN).lines.filter(({ role }) => role === "rank");
    expect(lines.map(({ rank }) => rank)).toEqual([0, 60]);
    expect(firstBad(metric)?.ranks.length).toBe(n_ranks);
  });

  it("are one where all ranks have the same values", () => {
    const same = points(0.1, 0.05);
    const metric = metricOf({ 0: same, 1: same, [ALL_RANKS]: [...same, ...same] });
    for (const mode of ["both", "ranks"] as const) {
      expect(shape(metric, { ...PLAIN, mode }).lines.at(-1)?.role).toBe("mean");
    }
  });

  it("are one where there is one rank", () => {
    const roles = shape(metricOf({ 0: [[0, 1]] }), PLAIN).lines.map(({ role }) => role);
    expect(roles).toEqual(["high", "low", "mean"]);
  });

  it("leave out what a logarithm cannot show, and stay linear where that is all", () => {
    const asked = { ...PLAIN, isLog: true };
    const mixed = shape(metricOf({ 0: points(-1, 2) }), asked);
    expect([mixed.isLog, [...(mixed.values[2] ?? [])]]).toEqual([true, [null, 2]]);
    expect(shape(metricOf({ 0: points(-1, 0) }), asked).isLog).toBe(false);
  });

  it("keep the original behind a smoothed line", () => {
    const made = shape(metricOf({ 0: points(0, 8) }), { ...PLAIN, smoothing: 0.5 });
    expect(made.lines.slice(2)).toEqual([
      { role: "mean", rank: ALL_RANKS, isFaint: true },
      { role: "mean", rank: ALL_RANKS, isFaint: false },
    ]);
  });

  it("are smoothed without a pull to zero", () => {
    expect(smooth([4, 4, undefined, 4], 0.9).map((v) => v && Number(v.toFixed(9)))).toEqual([
      4,
      4,
      undefined,
      4,
    ]);
    expect(smooth([0, 8], 0.5)[1]).toBeCloseTo((0.25 * 0 + 0.5 * 8) / 0.75);
  });
});

/** Ranks that log their own number at each of the steps from 0 on, each up to a step of its own. */
function whoLogItself(n_steps: readonly number[]): Record<number, Points> {
  const own = (rank: number, n: number) => points(...Array.from({ length: n }, () => rank));
  return Object.fromEntries(n_steps.map((n, rank) => [rank, own(rank, n)]));
}

describe("the mean while a rank is ahead", () => {
  const n_steps = [21, ...new Array<number>(16).fill(20)];
  const tip: Tip = { step: 19, mean: 8, end: 20 };
  const ends = (metric: Metric, mode: Options["mode"] = "both") =>
    shape(metric, { ...PLAIN, mode }).values.map((values) => values.findLast((v) => v != null));

  it("and its range end where most of the ranks are; lines of ranks at their own last point", () => {
    const metric = metricOf(whoLogItself(n_steps), 1, {}, tip);
    const made = shape(metric, PLAIN);
    const lengths = made.values.map((values) => values.findLastIndex((v) => v !== undefined) + 1);
    const isOfAll = made.lines.map(({ rank }) => rank === ALL_RANKS);
    expect(lengths).toEqual(made.lines.map(({ rank }, k) => (isOfAll[k] ? 20 : n_steps[rank])));
    expect(ends(metric, "mean")).toEqual([16, 0, 8]);
  });

  it("has no bucket in which that rank counts more than the others", () => {
    const metric = metricOf(whoLogItself([23, 20, 20, 20]), 4, {}, { ...tip, mean: 1.5 });
    expect(ends(metric, "mean")).toEqual([3, 0, 1.5]);
    const early = metricOf(whoLogItself([3, 1, 1, 1]), 4, {}, { step: 0, mean: 1.5, end: 1 });
    expect(shape(early, PLAIN).values[0]).toEqual([3]);
  });

  it("is missing in a detail of steps that few ranks have reached", () => {
    const beyond = metricOf({ 0: [[20, 0]], 1: [[20, 4]] }, 1, {}, tip);
    expect(ends(beyond, "mean")).toEqual([undefined, undefined, undefined]);
  });

  it("is the value of each rank where all have the same, as far as any has come", () => {
    const metric = metricOf({ 0: points(5, 6, 7), 1: points(5, 6), 2: points(5, 6) }, 1, {}, tip);
    expect(ends(metric)).toEqual([7, 7, 7]);
  });

  it("is told for that step, in a large gang with its number", () => {
    const metric = metricOf(whoLogItself(n_steps), 1, {}, tip);
    expect(readLast(metric, { np: 17, ranks: new Map() })).toMatchObject({
      steps: [19, 19],
      mean: 8,
    });
    const ranks = new Map(n_steps.map((_, k) => [k, rankWith(k, { metrics: { loss: k } })]));
    const { steps, mean, ranks: own } = readLast(metric, { np: 17, ranks }) ?? {};
    expect([steps, mean, own?.[16]]).toEqual([null, 8, { rank: 16, value: 16 }]);
  });
});

describe("what is told beside a plot", () => {
  it("is the values at a step, and the last ones without", () => {
    const metric = metricOf(TWO);
    expect(readAt(metric, 0)).toEqual({
      steps: [0, 0],
      mean: 2,
      ranks: [
        { rank: 0, value: 1 },
        { rank: 1, value: 3 },
      ],
    });
    expect(readLast(metric, { np: 2, ranks: new Map() })?.ranks).toEqual([
      { rank: 0, value: 2 },
      { rank: 1, value: 5 },
    ]);
    expect(readAt(metric, 1)?.ranks).toEqual([{ rank: 0, value: 2 }]);
  });

  it("is what the table of ranks says, and the mean that the kernel says", () => {
    const metric = metricOf(TWO, 2, {}, { step: 2, mean: 5, end: null });
    const ranks = new Map([0, 1].map((k) => [k, rankWith(k, { metrics: { loss: 4 + 4 * k } })]));
    const known = readLast(metric, { np: 2, ranks });
    expect(known).toMatchObject({ steps: null, mean: 5, ranks: [{ value: 4 }, { value: 8 }] });
    const most = readLast(metric, { np: 3, ranks });
    expect(most).toMatchObject({ steps: [2, 2], mean: 5, ranks: [{ value: 4 }, { value: 8 }] });
    expect(readLast(metric, { np: 2, ranks: new Map([[0, rankWith(0)]]) })?.ranks).toEqual(
      readLast(metric, { np: 2, ranks: new Map() })?.ranks,
    );
    const nan = metricOf(TWO, 2, {}, { step: 2, mean: "nan", end: null });
    expect(readLast(nan, { np: 2, ranks })?.mean).toBeNaN();
  });

  it("is where values stopped being finite, and on which ranks", () => {
    const metric = metricOf({ 0: [], 1: [], 2: [] }, 1, { 0: 150, 1: 120, 2: 120 });
    expect(firstBad(metric)).toEqual({ step: 120, ranks: [1, 2] });
    expect(firstBad(metricOf(TWO))).toBeNull();
  });
});

describe("numbers", () => {
  it("are short and keep what matters", () => {
    const told = [0, 0.75251, -12.3456, 12345.6, 1.2e-5, 3.4567e19, Number.NaN, -1 / 0].map(figure);
    expect(told).toEqual(["0", "0.7525", "−12.35", "12,346", "1.2e−5", "3.457e19", "NaN", "−∞"]);
    expect([98_765_432_100, 98765432.5].map(figure)).toEqual(["98,765,432,100", "9.877e7"]);
    expect([1_000_001, -5, 3e15].map(stepLabel)).toEqual(["1,000,001", "−5", "3e15"]);
  });

  it("on axes have the digits that change", () => {
    expect([0.25, 0.5].map((x) => tickLabel(x, 0.25))).toEqual(["0.25", "0.50"]);
    expect(tickLabel(0.7321, 0.0001)).toBe("0.7321");
    expect(tickLabel(1500, 500)).toBe("1,500");
    expect(tickLabel(2.5e-4, 5e-5)).toBe("2.5e−4");
  });

  it("of time are in the unit that suits", () => {
    expect([12.345, 0.0113, 8.4e-4, 3e-8, 200].map(lapse)).toEqual([
      "12.3 s",
      "11.3 ms",
      "840 µs",
      "30 ns",
      "3 min 20 s",
    ]);
    const rounded = [0.9999, 59.4, 59.6, 119.6, 179.8, 3599.6, 7530];
    expect(rounded.map(lapse)).toEqual([
      "1 s",
      "59.4 s",
      "1 min 0 s",
      "2 min 0 s",
      "3 min 0 s",
      "1 h 0 min",
      "2 h 5 min",
    ]);
    expect(moment(9.40616, 1e-5)).toBe("9.40616 s");
    expect([0, 0.004, 0.476, 0.0001].map(percent)).toEqual(["0 %", "0.4 %", "48 %", "<0.1 %"]);
  });
});

describe("the section", () => {
  it("puts charts side by side as the width allows", () => {
    expect([400, 700, 1200].map((px) => columnsFor(px, 6))).toEqual([1, 2, 3]);
    expect([columnsFor(1200, 4), columnsFor(1200, 1), columnsFor(1200, 0)]).toEqual([2, 1, 1]);
  });

  it("looks at all steps of all charts", () => {
    expect(wholeOf([metricOf({ 0: [[3, 1]] }), metricOf({ 0: [[90, 1]] })])).toEqual([3, 90]);
    expect(wholeOf([])).toEqual([0, 1]);
  });

  it("gives flat and positive curves an axis of their own", () => {
    expect(airy(0.02, 1)[0]).toBe(0);
    expect(airy(2, 2)).toEqual([1.9, 2.1]);
    expect(airy(0, 0)).toEqual([0, 1]);
  });

  it("has few and round ticks on logarithmic axes", () => {
    expect(logTicks(0.3, 3.4)).toEqual([0.5, 1, 2]);
    expect(logTicks(1e-9, 5e-2)).toEqual([1e-9, 1e-7, 1e-5, 1e-3]);
    expect(logTicks(0.002, 900)).toEqual([0.01, 0.1, 1, 10, 100]);
    expect(logTicks(2.1, 4.4)).toEqual([3, 4]);
    expect(logTicks(2.1, 2.4)).toEqual([2.1, 2.2, 2.3, 2.4]);
    expect(logLabels([2.1, 2.2, 2.3, 2.4])).toEqual(["2.1", "2.2", "2.3", "2.4"]);
    expect(logLabels([0.1, 1, 10])).toEqual(["0.1", "1", "10"]);
  });

  it("asks for detail when buckets are wide and few", () => {
    const metric = metricOf(
      {
        0: [
          [0, 1],
          [9999, 1],
        ],
      },
      16,
    );
    expect(wantedDetail(metric, [1000, 1100])).toEqual([950, 1151]);
    expect(wantedDetail(metric, [0, 9000])).toBeNull();
    expect(wantedDetail(metric, null)).toBeNull();
    expect(wantedDetail(metricOf(TWO), [0, 2])).toBeNull();
  });
});

describe("a value without a neighbour", () => {
  it("is drawn as a point, since a line alone shows nothing of it", () => {
    const _ = undefined;
    expect(isolated([_, 5])).toEqual([1]);
    expect(isolated([1, _, 2])).toEqual([]);
    expect(isolated([null, _])).toEqual([]);
    expect(isolated([1, null, _, 2, _, null, 3, 4, null, 5])).toEqual([0, 3, 9]);
  });
});
