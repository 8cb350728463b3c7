import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { Interrupted } from "../src/interrupt";
import type { Ack, Command } from "../src/protocol";
import { BUSY, BY_HAND, REFUSED, Stopping } from "../src/stopping";

let commands: Command[];
let settle: (ack: Partial<Ack>) => void;
let isBlocking: boolean;
let came: Interrupted;
let n_interrupts: number;
let stopping: Stopping;

beforeEach(() => {
  vi.useFakeTimers();
  commands = [];
  isBlocking = true;
  came = "done";
  n_interrupts = 0;
  stopping = new Stopping({
    ask: (command) => {
      commands.push(command);
      return new Promise((done) => {
        settle = (ack) => done({ kind: "ack", to: "me", id: "1", ok: true, ...ack });
      });
    },
    interrupt: async () => {
      n_interrupts += 1;
      return came;
    },
    isBlocking: () => isBlocking,
    changed: () => {},
  });
});
afterEach(() => {
  stopping.close();
  vi.useRealTimers();
});

describe("stop", () => {
  test("is shown at once, and ordered once however often it is clicked", () => {
    stopping.stop();
    stopping.stop();
    expect(stopping.isAsked).toBe(true);
    expect(commands).toEqual([{ do: "stop" }]);
  });

  test("that was heard leaves the server alone", async () => {
    stopping.stop();
    settle({});
    await vi.advanceTimersByTimeAsync(5000);
    expect(n_interrupts).toBe(0);
  });

  test("that was not heard within 1.2 s interrupts the kernel, once", async () => {
    stopping.stop();
    await vi.advanceTimersByTimeAsync(1150);
    expect(n_interrupts).toBe(0);
    await vi.advanceTimersByTimeAsync(100);
    expect(n_interrupts).toBe(1);
    expect(stopping.hint).toBe("");
    await vi.advanceTimersByTimeAsync(10_000);
    expect(n_interrupts).toBe(1);
  });

  test.each([
    ["no server here", BY_HAND],
    ["refused", REFUSED],
  ] as const)(
    "where the server's answer is %s, the reader is told what to press",
    async (how, hint) => {
      came = how;
      stopping.stop();
      await vi.advanceTimersByTimeAsync(1300);
      expect(stopping.hint).toBe(hint);
    },
  );

  test("never interrupts a cell that is not this gang's", async () => {
    isBlocking = false;
    stopping.stop();
    await vi.advanceTimersByTimeAsync(10_000);
    expect(n_interrupts).toBe(0);
    expect(stopping.hint).toBe(BUSY);
  });

  test("that was refused says why, and may be asked again", async () => {
    stopping.stop();
    settle({ ok: false, text: "it has ended already" });
    await vi.advanceTimersByTimeAsync(1);
    expect(stopping.hint).toBe("it has ended already");
    stopping.stop();
    expect(commands).toHaveLength(2);
  });

  test("is forgotten when the gang ended, late answers too", async () => {
    stopping.stop();
    stopping.reset();
    settle({ ok: false, text: "too late" });
    await vi.advanceTimersByTimeAsync(5000);
    expect([stopping.isAsked, stopping.hint, n_interrupts]).toEqual([false, "", 0]);
    expect(stopping.isKillOffered).toBe(false);
  });
});

describe("kill", () => {
  test("is offered 2 s after the click on stop", () => {
    stopping.stop();
    vi.advanceTimersByTime(1900);
    expect(stopping.isKillOffered).toBe(false);
    vi.advanceTimersByTime(200);
    expect(stopping.isKillOffered).toBe(true);
  });

  test("is offered too where somebody else stops the gang", () => {
    stopping.seen();
    stopping.seen();
    vi.advanceTimersByTime(2100);
    expect(stopping.isKillOffered).toBe(true);
    expect(commands).toEqual([]);
  });

  test("is offered no longer when the gang goes on, unless it was asked to stop here", () => {
    stopping.seen();
    vi.advanceTimersByTime(1000);
    stopping.passed();
    vi.advanceTimersByTime(5000);
    expect(stopping.isKillOffered).toBe(false);
    stopping.stop();
    stopping.passed();
    vi.advanceTimersByTime(2100);
    expect([stopping.isAsked, stopping.isKillOffered]).toEqual([true, true]);
  });

  test("not heard interrupts twice where Stop was heard: the first interrupt stops", async () => {
    stopping.stop();
    settle({});
    await vi.advanceTimersByTimeAsync(2100);
    stopping.kill();
    await vi.advanceTimersByTimeAsync(1300);
    expect(n_interrupts).toBe(1);
    await vi.advanceTimersByTimeAsync(10_000);
    expect(n_interrupts).toBe(2);
  });

  test("heard late does not interrupt again", async () => {
    stopping.stop();
    settle({});
    await vi.advanceTimersByTimeAsync(2100);
    stopping.kill();
    await vi.advanceTimersByTimeAsync(1300);
    settle({});
    await vi.advanceTimersByTimeAsync(10_000);
    expect(n_interrupts).toBe(1);
  });

  test("not heard interrupts the kernel again: the second interrupt kills", async () => {
    stopping.stop();
    await vi.advanceTimersByTimeAsync(2100);
    stopping.kill();
    expect(stopping.isKillOffered).toBe(false);
    await vi.advanceTimersByTimeAsync(1300);
    expect(commands).toEqual([{ do: "stop" }, { do: "kill" }]);
    expect(n_interrupts).toBe(2);
  });
});
