import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { Painter } from "../src/painter";

const FRAME_MS = 1;

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("requestAnimationFrame", (paint: () => void) => setTimeout(paint, FRAME_MS));
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe("painting", () => {
  it("is at most so often, and not forgotten", () => {
    const paint = vi.fn();
    const painter = new Painter(paint, 100);
    for (let ms = 0; ms < 1000; ms += 10) {
      painter.ask();
      vi.advanceTimersByTime(10);
    }
    vi.advanceTimersByTime(200);
    expect(paint.mock.calls.length).toBeGreaterThanOrEqual(9);
    expect(paint.mock.calls.length).toBeLessThanOrEqual(12);
  });

  it("waits while the canvas is not visible", () => {
    const paint = vi.fn();
    const painter = new Painter(paint, 100);
    painter.setSeen(false);
    painter.ask();
    vi.advanceTimersByTime(500);
    expect(paint).not.toHaveBeenCalled();
    painter.setSeen(true);
    vi.advanceTimersByTime(100);
    expect(paint).toHaveBeenCalledTimes(1);
    painter.end();
    painter.askNow();
    vi.advanceTimersByTime(100);
    expect(paint).toHaveBeenCalledTimes(1);
  });

  it("is at the next frame after an interaction, and once", () => {
    const paint = vi.fn();
    const painter = new Painter(paint, 100);
    painter.ask();
    painter.askNow();
    vi.advanceTimersByTime(FRAME_MS);
    expect(paint).toHaveBeenCalledTimes(1);
    painter.ask();
    painter.askNow();
    vi.advanceTimersByTime(FRAME_MS);
    expect(paint).toHaveBeenCalledTimes(2);
    painter.ask();
    vi.advanceTimersByTime(99 - FRAME_MS);
    expect(paint).toHaveBeenCalledTimes(2);
    vi.advanceTimersByTime(100);
    expect(paint).toHaveBeenCalledTimes(3);
  });
});
