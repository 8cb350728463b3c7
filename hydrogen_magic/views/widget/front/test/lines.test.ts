import { expect, test } from "vitest";
import { MOST_HITS, search } from "../src/lines";
import { lineOf } from "./kernel";

test("a search finds the newest lines, in order, if there are too many hits", () => {
  const lines = Array.from({ length: 30 }, () => lineOf(0, "e".repeat(1000)));
  const hits = search(lines, 100, null, "E");
  expect(hits).toHaveLength(MOST_HITS);
  expect(hits[0]).toEqual({ line: 120, from: 0, until: 1 });
  expect(hits.at(-1)).toEqual({ line: 129, from: 999, until: 1000 });
});

test("a hit is where its text is, also after letters that are longer in lower case", () => {
  expect(search([lineOf(0, "İİ Loss")], 0, null, "loss")).toEqual([{ line: 0, from: 3, until: 7 }]);
  expect(search([lineOf(0, "İstanbul")], 0, null, "İST")).toHaveLength(1);
});
