import { describe, expect, it } from "vitest";
import { lowerBound, readerOf, Table, upperBound } from "../src/columns";
import { random } from "./data";

describe("searching", () => {
  it("finds what a walk finds", () => {
    const keys = Float64Array.of(1, 2, 2, 2, 5, 9);
    for (let key = 0; key <= 10; key += 0.5) {
      expect(lowerBound(keys, 6, key)).toBe(keys.filter((k) => k < key).length);
      expect(upperBound(keys, 6, key)).toBe(keys.filter((k) => k <= key).length);
    }
  });
});

describe("reading", () => {
  it("copies columns out of a buffer that is not aligned", () => {
    const bytes = new Uint8Array(3 + 8 + 4);
    bytes.set(new Uint8Array(Float64Array.of(1.5).buffer), 3);
    bytes.set(new Uint8Array(Float32Array.of(-2).buffer), 11);
    const reader = readerOf([new DataView(bytes.buffer, 3)], 0, "test");
    expect([...reader.take(Float64Array, 1), ...reader.take(Float32Array, 1)]).toEqual([1.5, -2]);
  });

  it("says what is missing", () => {
    expect(() => readerOf([], 3, "spans of rank 2")).toThrow(
      "spans of rank 2: there is no buffer 3",
    );
    const reader = readerOf([new DataView(new ArrayBuffer(8))], 0, "curves");
    expect(() => reader.take(Float64Array, 2)).toThrow("holds 8 bytes, 16 are needed");
  });
});

describe("a table", () => {
  const table = () =>
    new Table<[Float64Array, Float32Array]>([new Float64Array(0), new Float32Array(0)]);

  it("keeps rows sorted, whatever chunks they come in", () => {
    const next = random(3);
    for (let round = 0; round < 40; round++) {
      const mine = table();
      const all: number[] = [];
      for (let chunk = 0; chunk < 12; chunk++) {
        const keys = Float64Array.from({ length: Math.floor(next() * 9) }, () =>
          Math.floor(next() * 40 + chunk * 5),
        ).sort();
        mine.insert([keys, Float32Array.from(keys)], "keep both");
        all.push(...keys);
      }
      expect([...mine.columns[0].subarray(0, mine.n)]).toEqual(all.sort((a, b) => a - b));
      expect([...mine.columns[1].subarray(0, mine.n)]).toEqual(all);
    }
  });

  it("replaces rows of equal keys", () => {
    const mine = table();
    mine.insert([Float64Array.of(1, 3, 5), Float32Array.of(1, 1, 1)], "replace");
    mine.insert([Float64Array.of(3, 4, 6), Float32Array.of(2, 2, 2)], "replace");
    expect([...mine.columns[0].subarray(0, mine.n)]).toEqual([1, 3, 4, 5, 6]);
    expect([...mine.columns[1].subarray(0, mine.n)]).toEqual([1, 2, 2, 1, 2]);
  });

  it("tells the first row that changed, and forgets the first", () => {
    const mine = table();
    expect(mine.insert([Float64Array.of(1, 2), Float32Array.of(1, 2)], "keep both")).toBe(0);
    expect(mine.insert([Float64Array.of(2), Float32Array.of(3)], "keep both")).toBe(2);
    mine.dropFirst(2);
    expect([...mine.columns[1].subarray(0, mine.n)]).toEqual([3]);
  });
});
