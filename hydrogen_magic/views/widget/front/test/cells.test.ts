import { expect, test } from "vitest";
import { gridFor, rankAt } from "../src/view/cells";

test.each([
  [17, 1000],
  [128, 1000],
  [1024, 1060],
  [1024, 0],
])("%d ranks in %d pixels are a strip", (np, width) => {
  const grid = gridFor(np, width);
  expect(grid.columns * grid.rows).toBeGreaterThanOrEqual(np);
  expect(grid.columns * grid.pitch).toBeLessThanOrEqual(width || 800);
  expect(grid.rows * grid.pitch).toBeLessThanOrEqual(168);
});

test("more ranks than fit have the smallest cells, and the strip grows", () => {
  expect(gridFor(16_384, 600)).toEqual({ columns: 100, rows: 164, pitch: 6 });
});

test("a place in the grid is its rank, and none beyond the last one", () => {
  const grid = { columns: 10, rows: 2, pitch: 12 };
  expect(rankAt(grid, 15, 0, 0)).toBe(0);
  expect(rankAt(grid, 15, 47, 13)).toBe(13);
  expect(rankAt(grid, 15, 60, 13)).toBeNull();
  expect(rankAt(grid, 15, 121, 1)).toBeNull();
  expect(rankAt(grid, 15, 5, -1)).toBeNull();
});
