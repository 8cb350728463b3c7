import { describe, expect, it } from "vitest";
import { byKey, clamp, pan, type Range, zoom } from "../src/range";
import { fitted, tickStep, ticks, toTime, toX } from "../src/timeline/geometry";
import { free, rangeOf, zoomed } from "../src/timeline/look";
import { wheelFactor } from "../src/timeline/pointer";

const scale = { range: [2, 4] as Range, leftPx: 100, widthPx: 1000 };

describe("geometry", () => {
  it("goes from time to pixel and back", () => {
    expect([toX(scale, 2), toX(scale, 3), toX(scale, 4)]).toEqual([100, 600, 1100]);
    for (const x of [100, 333.3, 1100]) expect(toX(scale, toTime(scale, x))).toBeCloseTo(x, 9);
  });

  it("has round ticks, far enough apart, from hours to microseconds", () => {
    for (let power = -6; power < 6; power += 0.37) {
      const [from, until] = [0.3, 0.3 + 10 ** power];
      const found = ticks({ range: [from, until], leftPx: 0, widthPx: 900 });
      const stepPx = (900 * tickStep(until - from, 900)) / (until - from);
      expect(stepPx).toBeGreaterThanOrEqual(83.9);
      expect(stepPx).toBeLessThan(400);
      expect(new Set(found.map(({ label }) => label)).size).toBe(found.length);
    }
  });

  it("labels ticks in the unit of what is in sight", () => {
    const labels = (range: Range) => ticks({ range, leftPx: 0, widthPx: 400 }).map((t) => t.label);
    expect(labels([0, 8])).toEqual(["0 s", "2 s", "4 s", "6 s", "8 s"]);
    expect(labels([0.1, 0.1004])).toEqual([
      "100.0 ms",
      "100.1 ms",
      "100.2 ms",
      "100.3 ms",
      "100.4 ms",
    ]);
    expect(labels([0, 0.0004])[1]).toBe("100 µs");
    expect(labels([9000, 16000])).toEqual(["2 h 30", "3 h 00", "3 h 30", "4 h 00"]);
  });

  it("cuts names to the room there is", () => {
    const measure = (text: string) => text.length * 6;
    expect(fitted("backward", 48, measure)).toBe("backward");
    expect(fitted("backward", 40, measure)).toBe("backw…");
    expect(fitted("backward", 20, measure)).toBe("");
  });
});

describe("ranges", () => {
  const bounds: Range = [0, 10];
  it("stay inside of what there is", () => {
    expect(clamp([-2, 3], bounds)).toEqual([0, 5]);
    expect(clamp([7, 30], bounds)).toEqual([0, 10]);
    expect(pan([2, 4], 100, bounds)).toEqual([8, 10]);
  });

  it("keep what is under the pointer", () => {
    const [from, until] = zoom([2, 6], 3, 0.5, bounds, 1e-6);
    expect([from, until]).toEqual([2.5, 4.5]);
    expect(zoom([2, 6], 3, 1e-12, bounds, 0.5)).toEqual([2.875, 3.375]);
    expect(zoom([2, 6], 3, 100, bounds, 0.5)).toEqual([0, 10]);
  });

  it("follow the keys", () => {
    const at = (key: string) => byKey(key, [4, 6], bounds, 1e-6);
    expect(at("ArrowLeft")).toEqual([3.6, 5.6]);
    expect(at("ArrowRight")).toEqual([4.4, 6.4]);
    expect((at("+") as Range)[0]).toBeCloseTo(4.4);
    expect((at("-") as Range)[1] - (at("-") as Range)[0]).toBeCloseTo(2 / 0.6);
    expect([at("0"), at("a")]).toEqual(["whole", null]);
  });

  it("follow a live run until the reader goes elsewhere", () => {
    expect(rangeOf({ kind: "whole" }, 20)).toEqual([0, 20]);
    expect(rangeOf({ kind: "live", widthS: 5 }, 20)).toEqual([15, 20]);
    expect(zoomed({ kind: "whole" }, 19.9, 0.5, 20, true)).toEqual({ kind: "live", widthS: 10 });
    expect(zoomed({ kind: "whole" }, 5, 0.5, 20, true)).toEqual({
      kind: "free",
      range: [2.5, 12.5],
    });
    expect(zoomed({ kind: "free", range: [2, 18] }, 9, 4, 20, true)).toEqual({ kind: "whole" });
    expect(free([-3, 2], 20)).toEqual({ kind: "free", range: [0, 5] });
  });

  it("leave the plain wheel to the page", () => {
    const plain = { deltaY: 300, ctrlKey: false } as WheelEvent;
    expect(wheelFactor(plain)).toBeNull();
    expect(wheelFactor({ ...plain, ctrlKey: true, deltaMode: 0 } as WheelEvent)).toBe(2);
  });
});
