import { expect, test } from "vitest";
import { grouped, nameIn } from "../src/curves/groups";

const NAMES = ["loss", "train/a", "train/b", "val/a", "lr"];
const told = (pinned: string[], wanted: string, most = 6) =>
  grouped(NAMES, new Set(pinned), wanted, most).map(
    ({ title, names, isFoldedAtFirst }) => `${isFoldedAtFirst ? "-" : "+"}${title}: ${names}`,
  );

test("metrics stand together by what comes before their slash", () => {
  expect(told([], "")).toEqual(["+metrics: loss,lr", "+train: train/a,train/b", "+val: val/a"]);
  expect(["train/a", "trainer"].map((name) => nameIn("train", name))).toEqual(["a", "trainer"]);
});

test("pinned metrics come first, and groups past the first charts are folded", () => {
  expect(told(["val/a"], "", 2)).toEqual([
    "+pinned: val/a",
    "+metrics: loss,lr",
    "-train: train/a,train/b",
  ]);
});

test("a search leaves what contains it, unfolded", () => {
  expect(told([], " /A", 1)).toEqual(["+train: train/a", "+val: val/a"]);
});
