import { describe, expect, it, vi } from "vitest";
import { Painter } from "../src/painter";

describe("painting", () => {
  function clocked() {
    let nowMs = 0;
    const frames: (() => void)[] = [];
    const later: [number, () => void][] = [];
    const clock = {
      nowMs: () => nowMs,
      frame: (paint: () => void) => void frames.push(paint),
      later: (paint: () => void, ms: number) => void later.push([nowMs + ms, paint]),
    };
    const run = (untilMs: number) => {
      for (; nowMs <= untilMs; nowMs += 1) {
        for (const [at, call] of later.splice(0)) at <= nowMs ? call() : later.push([at, call]);
        for (const call of frames.splice(0)) call();
      }
    };
    return { clock, run };
  }

  it("is at most so often, and not forgotten", () => {
    const paint = vi.fn();
    const { clock, run } = clocked();
    const painter = new Painter(paint, 100, clock);
    for (let ms = 0; ms < 1000; ms += 10) {
      painter.ask();
      run(ms);
    }
    run(1200);
    expect(paint.mock.calls.length).toBeGreaterThanOrEqual(9);
    expect(paint.mock.calls.length).toBeLessThanOrEqual(12);
  });

  it("waits while nobody sees it", () => {
    const paint = vi.fn();
    const { clock, run } = clocked();
    const painter = new Painter(paint, 100, clock);
    painter.setSeen(false);
    painter.ask();
    run(500);
    expect(paint).not.toHaveBeenCalled();
    painter.setSeen(true);
    run(600);
    expect(paint).toHaveBeenCalledTimes(1);
    painter.end();
    painter.askNow();
    run(700);
    expect(paint).toHaveBeenCalledTimes(1);
  });
});
