import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { Channel, randomId } from "../src/channel";
import type { Ack, Sent } from "../src/protocol";

let sent: Sent[];
let channel: Channel;

beforeEach(() => {
  vi.useFakeTimers();
  sent = [];
  channel = new Channel("me", (command) => void sent.push(command));
});
afterEach(() => {
  channel.close();
  vi.useRealTimers();
});

const ackOf = (command: Sent | undefined, ok = true): Ack => ({
  kind: "ack",
  to: "me",
  id: command?.id ?? "",
  ok,
});

describe("a command", () => {
  test("is repeated with its id until it is acknowledged", async () => {
    const answer = channel.ask({ do: "stop" });
    vi.advanceTimersByTime(800);
    expect(sent.map((command) => command.do)).toEqual(["stop", "stop", "stop"]);
    expect(new Set(sent.map((command) => command.id)).size).toBe(1);
    channel.acked(ackOf(sent[0]));
    expect((await answer).ok).toBe(true);
    vi.advanceTimersByTime(60_000);
    expect(sent).toHaveLength(3);
  });

  test("is repeated three times before 1.2 s are over, and seldom later", () => {
    void channel.ask({ do: "stop" });
    vi.advanceTimersByTime(1200);
    expect(sent).toHaveLength(4);
    vi.advanceTimersByTime(20_000);
    expect(sent.length).toBeLessThan(20);
  });

  test("that nobody answers is given up, and says so", async () => {
    const answer = channel.ask({ do: "stacks" });
    vi.advanceTimersByTime(10 * 60_000);
    const ack = await answer;
    expect(ack.ok).toBe(false);
    expect(ack.text).toContain("did not respond");
    const n_sent = sent.length;
    vi.advanceTimersByTime(10 * 60_000);
    expect(sent).toHaveLength(n_sent);
  });

  test("without a connection fails at once with its reason", async () => {
    const before = channel.ask({ do: "csv" });
    channel.lose("The kernel was restarted.");
    const answers = [await before, await channel.ask({ do: "csv" })];
    expect(answers.map(({ ok, text }) => [ok, text])).toEqual([
      [false, "The kernel was restarted."],
      [false, "The kernel was restarted."],
    ]);
    vi.advanceTimersByTime(60_000);
    expect(sent).toHaveLength(1);
    channel.restore();
    void channel.ask({ do: "csv" });
    expect(sent).toHaveLength(2);
  });

  test("that the kernel works on is not given up, and its last answer is asked for", async () => {
    const answer = channel.ask({ do: "trace" });
    const settled = vi.fn();
    void answer.then(settled);
    for (let n_acked = 0; n_acked < 200; n_acked++) {
      channel.acked({ ...ackOf(sent[0]), pending: true });
      await vi.advanceTimersByTimeAsync(1500);
    }
    expect(settled).not.toHaveBeenCalled();
    expect(sent.length).toBeGreaterThan(100);
    channel.acked(ackOf(sent[0]));
    expect((await answer).ok).toBe(true);
  });

  test("has an id and the client's name, and another one each time", () => {
    void channel.ask({ do: "stop" });
    void channel.ask({ do: "stop" });
    expect(sent[0]?.id).not.toBe(sent[1]?.id);
    expect(sent.map((command) => command.client)).toEqual(["me", "me"]);
  });

  test("stays unanswered by the ack of another", async () => {
    void channel.ask({ do: "stacks" });
    channel.acked({ kind: "ack", to: "me", id: "me.77", ok: true });
    vi.advanceTimersByTime(400);
    expect(sent).toHaveLength(2);
  });
});

describe("hello", () => {
  test("is said once at a time", () => {
    channel.hello();
    channel.hello();
    expect(sent).toHaveLength(1);
    channel.acked(ackOf(sent[0]));
    channel.hello();
    expect(sent).toHaveLength(2);
  });

  test("needs no ack once everything came", () => {
    channel.hello();
    void channel.ask({ do: "stop" });
    channel.greeted();
    vi.advanceTimersByTime(400);
    expect(sent.map((command) => command.do)).toEqual(["hello", "stop", "stop"]);
  });
});

test("ids are long and differ", () => {
  const ids = new Set(Array.from({ length: 100 }, randomId));
  expect(ids.size).toBe(100);
  for (const id of ids) expect(id).toMatch(/^[A-Za-z0-9-]{12}$/);
});
