import { expect, test } from "vitest";
import { barTitle, columnsOf, fastest, stateText, Widths } from "../src/view/figures";
import { rankWith } from "./kernel";

const bar = { desc: "epoch 2:", n: 1200, total: 4000, unit: "it", per_s: null };

const titles = (...rows: Parameters<typeof columnsOf>[0]) => {
  const { before, after } = columnsOf(rows);
  return [...before, ...after].map((one) => one.title);
};

test("a column that nobody has anything for is not there", () => {
  expect(titles(rankWith(0))).toEqual(["device"]);
  expect(titles(rankWith(0), rankWith(1, { bar, gpu_percent: 3 }))).toEqual([
    "device",
    "done",
    "GPU",
  ]);
});

test("hosts are named where there are several", () => {
  const rows = [rankWith(0), rankWith(1, { host: "node-b" })];
  expect(columnsOf(rows).before[0]?.texts).toEqual(["node-a · cpu", "node-b · cpu"]);
  const idle = rankWith(0, { phase: "idle", host: "", device: "" });
  expect(columnsOf([idle, rankWith(1)]).before[0]?.texts).toEqual(["", "cpu"]);
});

test("a metric may be named like a column of ours, and at most four are shown", () => {
  const metrics = { steps: 1, memory: 2, c: 3, d: 4, e: 5 };
  const { after } = columnsOf([rankWith(0, { metrics, steps: 9, rss_bytes: 5000 })]);
  expect(after.map((one) => one.title)).toEqual(["steps", "steps", "memory", "c", "d", "memory"]);
  expect(new Set(after.map((one) => one.key)).size).toBe(6);
});

test("the bar is named where all ranks name it alike", () => {
  expect(barTitle([rankWith(0, { bar }), rankWith(1)])).toBe("epoch 2");
  const other = { ...bar, desc: "epoch 3" };
  expect(barTitle([rankWith(0, { bar }), rankWith(1, { bar: other })])).toBe("progress");
});

test("a bar of fractions is not rounded to whole numbers", () => {
  const done = (n: number, total: number | null) =>
    columnsOf([rankWith(0, { bar: { ...bar, n, total } })]).after[0]?.texts[0];
  expect([done(1200, 4000), done(7, null)]).toEqual(["1,200/4,000", "7"]);
  expect([done(0.5, 1), done(1.2, 2.5), done(0.5, null)]).toEqual([
    "0.500/1.000",
    "1.200/2.500",
    "0.5000",
  ]);
});

test("a mark's word is said once", () => {
  expect(stateText(rankWith(0, { mark: "stopped", doing: "stopped by SIGSTOP" }))).toBe(
    "stopped by SIGSTOP",
  );
  expect(stateText(rankWith(0, { mark: "dead", phase: "failed", doing: "exit 1" }))).toBe("exit 1");
  expect(stateText(rankWith(0, { mark: "waiting", doing: "" }))).toBe("waiting · running");
});

test("ranks that predict rows are told by their speed", () => {
  const taken = (n: number, per_s: number | null) => ({
    bar: { desc: "", n, total: null, unit: "rows", per_s },
  });
  const rows = [rankWith(0, taken(6000, 300)), rankWith(1, taken(10, null))];
  expect(titles(...rows)).toEqual(["device", "rows", "rows/s"]);
  expect(columnsOf(rows).after.map((one) => one.texts)).toEqual([
    ["6,000", "10"],
    ["300", ""],
  ]);
  expect(fastest(rows)).toBe(300);
  expect(barTitle(rows)).toBe("relative speed");
});

test("a line does not break between a number and its unit", () => {
  const late = rankWith(0, { mark: "straggler", why: "peers wait 37 % of the time" });
  expect(stateText(late)).toBe("straggler: peers wait 37\u00a0% of the time");
});

test("widths never shrink", () => {
  const widths = new Widths();
  const wide = widths.of("loss", ["0.12345"]);
  expect(widths.of("loss", ["1"])).toBe(wide);
  expect(widths.of("lr", ["1"])).not.toBe(wide);
});

test("the steps are the optimizer's, beside what a bar counts", () => {
  const { after } = columnsOf([rankWith(0, { bar: { ...bar, n: 40 }, steps: 10 })]);
  expect(after.map(({ title, texts }) => [title, texts[0]])).toEqual([
    ["done", "40/4,000"],
    ["steps", "10"],
  ]);
});

test("a straggler's state is its reason", () => {
  const row = rankWith(0, { mark: "straggler", why: "40 steps, median 100" });
  expect(stateText(row)).toBe("straggler: 40 steps, median 100");
  expect(stateText(rankWith(0, { why: "among the slowest" }))).toBe("running · among the slowest");
});
