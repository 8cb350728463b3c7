import { expect, test } from "vitest";
import { column, count, duration, rate, roughly, size } from "../src/format";

test.each([
  [0.04, "0.0 s"],
  [9.94, "9.9 s"],
  [9.96, "10 s"],
  [59.7, "1:00"],
  [130, "2:10"],
  [3723, "1:02:03"],
  [183_840, "2 d 03:04"],
  [-3, "0.0 s"],
])("%d s are %s", (seconds, text) => expect(duration(seconds)).toBe(text));

test.each([
  [512, "512 B"],
  [1500, "1.5 kB"],
  [812_000_000, "812 MB"],
  [2_310_000_000, "2.31 GB"],
  [5e15, "5000.00 TB"],
  [99_960, "100 kB"],
  [999_999, "1.0 MB"],
  [999_999_999, "1.00 GB"],
])("%d bytes are %s", (bytes, text) => expect(size(bytes)).toBe(text));

test("rates have two or three digits that mean something", () => {
  expect([0.523, 12.44, 1240.4].map(rate)).toEqual(["0.52", "12.4", "1,240"]);
  expect([0.00333, 0.0521, 0].map(rate)).toEqual(["0.0033", "0.052", "0.00"]);
});

test("figures of a column have their points under each other", () => {
  expect(column([0.98123, 1.00377])).toEqual(["0.981", "1.004"]);
  expect(column([12.5, 123.456])).toEqual(["12.5", "123.5"]);
  expect(column([0.00001234, 0])).toEqual(["1.23e-5", "0.00e+0"]);
  expect(column([1e7 + 0.5])).toEqual(["1.00e+7"]);
});

test("whole numbers stay whole, and what is no number keeps its name", () => {
  expect(column([3, 12_000, "nan", "-inf", undefined])).toEqual(["3", "12,000", "nan", "-inf", ""]);
  expect(count(1_234_567)).toBe("1,234,567");
});

test("what is left is told without tenths", () => {
  expect([5.96, 0.2, -1, 9.9, 130].map(roughly)).toEqual(["6 s", "0 s", "0 s", "10 s", "2:10"]);
});
