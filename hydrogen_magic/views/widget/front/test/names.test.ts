import { expect, test } from "vitest";
import { shortNames } from "../src/names";

test.each([
  [
    ["loss", "validation/mean_accuracy_top_5"],
    ["loss", "…ccuracy_top_5"],
  ],
  [
    ["train/objective_head", "valid/objective_head"],
    ["train/objecti…", "valid/objecti…"],
  ],
  [
    ["a/objective_head_1", "a/objective_head_2", "b/objective_head_1", "b/objective_head_2"],
    ["a/objec…head_1", "a/objec…head_2", "b/objec…head_1", "b/objec…head_2"],
  ],
  [
    ["encoder/layer/01/attention/norm", "encoder/layer/02/attention/norm"],
    ["…1/attention/…", "…2/attention/…"],
  ],
])("long names stay different: %j", (names, short) => {
  expect(shortNames(names, 14)).toEqual(short);
});

test("names that differ twice in their middle are numbered", () => {
  const names = ["xx", "xy", "yx", "yy"].map(
    ([a, b]) => `${"-".repeat(20)}${a}${"-".repeat(20)}${b}${"-".repeat(20)}`,
  );
  expect(new Set(shortNames(names, 14)).size).toBe(4);
});
