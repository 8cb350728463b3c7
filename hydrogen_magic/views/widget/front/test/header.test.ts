import { describe, expect, test, vi } from "vitest";
import { type Model, Page } from "../src/page";
import type { GangWord } from "../src/protocol";
import { FakeModel, gangWith, rankWith } from "./kernel";
import { setStage } from "./stage";

const stage = setStage();

describe("the header", () => {
  test("offers to kill an attempt that fails, and not the next one", async () => {
    stage.say({ gang: gangWith({ state: "stopping", stop_reason: "failure" }) });
    await stage.pass(2100);
    expect(stage.button("Kill now")).toBeDefined();
    stage.say({ gang: gangWith({ state: "starting", attempt: 1 }) });
    expect(stage.button("Kill now")).toBeUndefined();
    await stage.pass(5000);
    stage.say({ gang: gangWith({ attempt: 1 }) });
    expect(stage.button("Kill now")).toBeUndefined();
  });

  test.each<GangWord>([
    "queued",
    "starting",
    "running",
    "stopping",
    "killing",
    "done",
    "failed",
    "stopped",
  ])("says %s in a word and in a shape", (state) => {
    stage.say({ gang: gangWith({ state, queued: [3, 8] }) });
    const pill = stage.find(".hm-pill");
    expect(pill.dataset.state).toBe(state);
    expect(pill.textContent).toBe(state === "queued" ? "queued 3/8" : state);
    expect(pill.querySelector("svg")).not.toBeNull();
    expect(pill.getAttribute("role")).toBe("status");
  });

  test("says how much of the closure has arrived while the gang starts", () => {
    const sending = "sending the closure: 3.1 GB of 100 GB, complete on 12 of 100 hosts";
    stage.say({ gang: gangWith({ state: "starting", sending }) });
    expect(stage.find(".hm-pill").textContent).toBe("starting"); // a screen reader reads it aloud
    expect(stage.find(".hm-facts").textContent).toContain(sending);
    stage.say({ gang: gangWith({ state: "stopping", stop_reason: "user", sending }) });
    expect(stage.find(".hm-facts").textContent).not.toContain(sending);
  });

  test("tells how far all ranks are where rows are counted", () => {
    const text = "1,200 of 5,000 rows · 800 rows/s · 4.8 s left";
    stage.say({ gang: gangWith({ rows: { share: 0.2499, text } }) });
    expect(stage.find(".hm-rows-figures").textContent).toBe(`24 %${text}`);
    expect(stage.find(".hm-rows .hm-fill").style.width).toBe("24.99%");
    expect(stage.button("Profile")).toBeUndefined();
    stage.say({ gang: gangWith({ rows: { share: 29 / 100, text } }) });
    expect(stage.find(".hm-percent").textContent).toBe("29 %");
  });

  test("tells no time left of rows once the kernel is gone", async () => {
    const rows = { share: 0.5, text: "2 of 4 rows · 4.8 s left" };
    for (const outlives of [true, false]) {
      stage.say({ gang: gangWith({ rows, outlives }) });
      stage.model.disconnect();
      await stage.pass(20);
      expect(stage.find(".hm-rows-figures").textContent).toBe("50 %");
    }
  });

  test("offers Stop while the gang lives, and nothing afterwards", () => {
    stage.say({ gang: gangWith() });
    expect(stage.button("Stop")).toBeDefined();
    stage.say({ gang: gangWith({ state: "done", ended_s: 3 }) });
    expect(stage.button("Stop")).toBeUndefined();
    expect(stage.words).toContain("3.0 s");
  });

  test("offers to record where ranks can be told to, and says whether they do", () => {
    stage.say({ gang: gangWith({ recording: true }) });
    expect(stage.button("Record timeline")?.getAttribute("aria-pressed")).toBe("true");
    for (const gone of [{ placement: "inline" }, { state: "stopping" }] as const) {
      stage.say({ gang: gangWith(gone) });
      expect(stage.button("Record timeline")).toBeUndefined();
      expect(stage.button("Profile")).toBeUndefined();
      expect(stage.button("Stacks")).toBeDefined();
    }
  });

  test("offers Stop while an attempt that has failed is ended: another one would follow", async () => {
    stage.say({ gang: gangWith({ state: "stopping", stop_reason: "failure" }) });
    stage.click("Stop");
    await stage.pass(20);
    expect(stage.model.sent.some((command) => command.do === "stop")).toBe(true);
    expect(stage.button("Stopping…")).toBeDefined();
  });

  test("answers a click on Stop at once, and offers to kill after 2 s", async () => {
    stage.say({ gang: gangWith() });
    stage.click("Stop");
    await stage.pass(20);
    expect(stage.button("Stopping…")?.getAttribute("aria-disabled")).toBe("true");
    expect(stage.find(".hm-pill").dataset.state).toBe("stopping");
    expect(stage.model.sent.some((command) => command.do === "stop")).toBe(true);
    expect(stage.button("Kill now")).toBeUndefined();
    await stage.pass(2100);
    const kill = stage.button("Kill now");
    const stop = stage.button("Stopping…");
    expect(kill?.nextElementSibling).toBe(stop); // which keeps its place at the right end
    kill?.focus();
    stage.click("Kill now");
    await stage.pass(20);
    expect(stage.model.sent.some((command) => command.do === "kill")).toBe(true);
    expect(kill?.getAttribute("aria-disabled")).toBe("true");
    expect(document.activeElement).toBe(kill);
  });

  test("keeps the focus through news and through the end", async () => {
    stage.say({ gang: gangWith() });
    const stop = stage.button("Stop");
    stop?.focus();
    stage.click("Stop");
    await stage.pass(20);
    stage.say({ gang: gangWith({ state: "stopping", warnings: ["w"] }), ranks: [rankWith(0)] });
    expect(document.activeElement).toBe(stop);
    stage.say({ gang: gangWith({ state: "stopped", ended_s: 2 }) });
    expect(document.activeElement).toBe(stage.find(".hm-controls"));
  });

  test("says that the kernel is silent after 4 s, and takes it back at its next word", async () => {
    stage.say({ gang: gangWith({ outermost: "epoch 3/10", remaining_s: 90, steps_per_s: 12 }) });
    vi.spyOn(performance, "now").mockImplementation(() => 1e9);
    await stage.pass(1100);
    expect(stage.find(".hm-pill").dataset.state).toBe("no contact");
    expect(stage.find(".hm-notices").textContent).toContain("No message from the kernel");
    expect(stage.find(".hm-facts").textContent).not.toMatch(/epoch|left|steps/); // of the past
    stage.say({});
    expect(stage.find(".hm-pill").dataset.state).toBe("running");
    expect(stage.find(".hm-facts").textContent).toMatch(/epoch 3.10.*~1:30 left.*12.* steps/);
  });

  test("names the way to a gang that outlives its restarted kernel, and offers no Stop", async () => {
    stage.say({ gang: gangWith({ outlives: true }) });
    stage.model.disconnect();
    await stage.pass(20);
    expect(stage.find(".hm-pill").dataset.state).toBe("no contact");
    expect(stage.find(".hm-notices").textContent).toContain("%gang attach amber-fox");
    for (const name of ["Stop", "Stacks", "Record timeline", "Profile"]) {
      expect(stage.button(name)?.getAttribute("aria-disabled")).toBe("true");
      stage.click(name);
    }
    expect(stage.commands).not.toContain("stop");
    expect(stage.commands).not.toContain("stacks");
    const shown = stage.find(".hm-elapsed").textContent;
    vi.spyOn(performance, "now").mockImplementation(() => 1e9); // it may have ended by now
    await stage.pass(1100);
    expect(stage.find(".hm-elapsed").textContent).toBe(shown);
  });

  test("a gang that ends with its restarted kernel has stopped", async () => {
    stage.say({
      gang: gangWith(),
      ranks: [rankWith(0), rankWith(1, { phase: "done" })],
    });
    stage.model.disconnect();
    await stage.pass(20);
    expect(stage.find(".hm-pill").dataset.state).toBe("stopped");
    expect(stage.find(".hm-notices").textContent).toContain("The gang has ended with it");
    expect(stage.button("Stop")).toBeUndefined();
    expect(stage.find(".hm-ranks").textContent).toMatch(/1 done.*1 stopped|1 stopped.*1 done/s);
    const took = stage.find(".hm-elapsed").textContent;
    vi.spyOn(performance, "now").mockImplementation(() => 1e9);
    await stage.pass(1100);
    expect(stage.find(".hm-elapsed").textContent).toBe(took);
  });

  test("a kernel that is heard again is asked for everything", async () => {
    stage.say({ full: true, gang: gangWith() });
    stage.model.disconnect();
    const n_asked = stage.commands.length;
    stage.say({});
    await stage.pass(50);
    expect(stage.commands.slice(n_asked)).toContain("hello");
    stage.say({ full: true, gang: gangWith() });
    expect(stage.find(".hm-pill").dataset.state).toBe("running");
  });

  test("a silent kernel may be interrupted while its cell waits for the gang", async () => {
    const silence = async (blocking: boolean) => {
      stage.model.traits.blocking = blocking;
      stage.say({ gang: gangWith() });
      vi.spyOn(performance, "now").mockImplementation(() => 1e9);
      await stage.pass(1100);
      const isDisabled = stage.button("Stop")?.getAttribute("aria-disabled");
      vi.restoreAllMocks();
      return isDisabled;
    };
    expect([await silence(true), await silence(false)]).toEqual(["false", "true"]);
  });

  test("without a server to ask, says which button stops the cell", async () => {
    stage.say({ gang: gangWith() });
    stage.click("Stop");
    await stage.pass(1400);
    expect(stage.find(".hm-notices").textContent).toContain("press the cell's stop button");
  });

  test("shows what the kernel answers to a command", async () => {
    stage.model.answer = (command) =>
      stage.model.ack(command, false, "torch is not loaded on any rank");
    stage.say({ gang: gangWith() });
    stage.click("Profile 5 steps");
    await stage.pass(20);
    expect(stage.find(".hm-notices").textContent).toContain("torch is not loaded");
  });

  test("keeps the answer when a chart requests its detail", async () => {
    const model = new FakeModel();
    model.answer = (command) => model.ack(command, false, `no ${command.do}`);
    const page = new Page(model as unknown as Model);
    await page.ask({ do: "profile", steps: 5 });
    await page.ask({ do: "detail", metric: "loss", from: 0, until: 9, buckets: 9 });
    expect(page.said?.text).toBe("no profile");
    page.close();
  });

  test.each(["without any part", "without its last part"])(
    "says that a file %s was lost, until the next command",
    async (lack) => {
      const { model } = stage;
      model.answer = (command) => model.ack(command);
      stage.say({ full: true, gang: gangWith(), lines: [[0, 0, "hello", 1]] });
      stage.click("Whole file");
      await stage.pass(10);
      const { client: to = "", id = "" } = model.sent.find((sent) => sent.do === "log") ?? {};
      const file = { kind: "file", to, id, name: "a.log", mime: "text/plain", parts: 2 } as const;
      if (lack !== "without any part") model.say({ ...file, part: 0 }, [new ArrayBuffer(1)]);
      await stage.pass(14_000);
      expect(stage.words).not.toContain("was not saved");
      await stage.pass(2000);
      expect(stage.words).toContain("The file was not saved");
      stage.click("Whole file");
      await stage.pass(20);
      expect(stage.words).not.toContain("was not saved");
      expect(stage.commands.filter((what) => what === "log")).toHaveLength(2);
    },
  );
});
