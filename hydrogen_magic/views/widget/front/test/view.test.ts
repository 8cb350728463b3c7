import { describe, expect, test, vi } from "vitest";
import { NAMES, packSpans } from "./data";
import { deltaWith, FakeModel, gangWith, lineOf, noTraits, rankWith, stacksOf } from "./kernel";
import { setStage } from "./stage";

const ONE_SPAN = { startS: 0.1, durationS: 0.5, name: 0, depth: 0 };
const stage = setStage();

test("hostile text is text wherever it is shown", () => {
  const evil = "</script><img src=x onerror=alert(1)><svg onload=alert(2)>";
  const row = rankWith(0, {
    device: evil,
    host: evil,
    doing: evil,
    mark: "dead",
    bar: { desc: evil, n: 1, total: 2, unit: evil, per_s: null },
    metrics: { [evil]: 1 },
  });
  const gang = gangWith({
    id: evil,
    title: evil,
    reason: evil,
    placement: evil,
    warnings: [evil],
    notices: [{ level: "error", text: `${evil}!` }],
  });
  const lines = [lineOf(0, evil), lineOf(0, `\x1b[31m${evil}`, 1)];
  const report = { text: `${evil}\n${evil}`, is_raised: false };
  stage.say({ gang, ranks: [row], lines, report, stacks: stacksOf([[0], evil]) });
  expect(stage.el.querySelectorAll("img, script, [onerror], [onload]")).toHaveLength(0);
  expect(stage.words.split("onerror=alert(1)").length).toBeGreaterThan(10);
});

test("the failure comes first, with its lines and the line that raised", () => {
  const text = "rank 1 failed: ValueError: no\n\n  Cell 2, line 3\n----> 3 raise ValueError";
  const report = { text, is_raised: false };
  stage.say({ gang: gangWith({ state: "failed" }), report });
  expect(stage.find(".hm-failure-title").textContent).toContain("rank 1 failed: ValueError: no");
  expect(stage.find(".hm-failure pre").textContent).toContain("Cell 2, line 3");
  expect(stage.find(".hm-arrow").textContent).toBe("----> 3 raise ValueError\n");
  expect(stage.find(".hm-failure").getAttribute("role")).toBe("alert");
  expect(stage.find<HTMLDetailsElement>(".hm-failure details").open).toBe(true);
  stage.say({ report: { ...report, is_raised: true } });
  expect(stage.find<HTMLDetailsElement>(".hm-failure details").open).toBe(false);
});

test("new stacks are scrolled to once, and not when the cell is shown again", () => {
  const scroll = vi.spyOn(HTMLElement.prototype, "scrollIntoView").mockReturnValue();
  stage.say({ gang: gangWith(), stacks: stacksOf([[0], "read"]) });
  expect(scroll).toHaveBeenCalledTimes(1);
  stage.leave();
  stage.show();
  stage.say({});
  expect(stage.all("summary")).toEqual(["rank 0"]);
  stage.say({ full: true, gang: gangWith(), stacks: stacksOf([[0], "read"]) });
  expect(scroll).toHaveBeenCalledTimes(1);
  stage.say({ stacks: stacksOf([[0], "wait"]) });
  expect(scroll).toHaveBeenCalledTimes(2);
});

test("stacks name their ranks, and how many ranks have none here", () => {
  const stacks = stacksOf([[2], "read"], [[0, 1, 3], "wait"]);
  stage.say({ gang: gangWith(), stacks });
  expect(stage.all("summary")).toEqual(["rank 2", "ranks 0, 1, 3"]);
  expect(stage.words).not.toContain("other ranks");
  stage.say({ stacks: { ...stacks, n_left_out: 700 } });
  expect(stage.words).toContain("700 other ranks with yet other stacks");
});

test("one of a kind has no plural, for screen readers neither", () => {
  const { deltas, buffers } = packSpans([{ rank: 0, track: "spans", spans: [ONE_SPAN] }]);
  stage.say(
    {
      gang: gangWith({ np: 1 }),
      ranks: [rankWith(0, { steps: 1 })],
      lines: [lineOf(0, "hello")],
      names: NAMES,
      spans: deltas.map((delta) => ({ ...delta, skipped: 1 })),
      stacks: { ...stacksOf([[0], "read"]), n_left_out: 1 },
    },
    buffers.map((each) => each.buffer as ArrayBuffer),
  );
  const read = ["aria-label", "aria-valuetext", "title"].flatMap((name) =>
    [...stage.el.querySelectorAll(`[${name}]`)].map((each) => each.getAttribute(name)),
  );
  const said =
    [...stage.all(".hm *"), ...read].join("\n").match(/(?<![\d.,])1 [a-z ]*[a-z]/g) ?? [];
  for (const noun of ["rank", "span", "line", "other rank"])
    expect(said.some((each) => each.startsWith(`1 ${noun}`))).toBe(true);
  expect(said.filter((each) => /^1 (other )?(rank|span|line|step)s/.test(each))).toEqual([]);
});

test("a section that was folded stays so in the next view", () => {
  stage.say({ gang: gangWith(), lines: [lineOf(0, "hello")] });
  const fold = () => stage.find(".hm-output .hm-fold");
  stage.click("Output");
  expect(fold().getAttribute("aria-expanded")).toBe("false");
  expect(stage.words).not.toContain("hello");
  stage.leave();
  stage.show();
  expect(fold().getAttribute("aria-expanded")).toBe("false");
  stage.click("Output");
  expect(stage.words).toContain("hello");
});

describe("views come and go", () => {
  test("a view that is built anew shows everything at once, without asking the kernel", () => {
    stage.say({ gang: gangWith(), lines: [lineOf(0, "kept")] });
    const n_sent = stage.model.sent.length;
    stage.leave();
    stage.show();
    expect(stage.words).toContain("kept");
    expect(stage.model.sent).toHaveLength(n_sent);
  });

  test("hello is the first word, and repeated until the kernel answers", async () => {
    await stage.pass(800);
    expect(stage.commands).toEqual(["hello", "hello", "hello"]);
  });

  test("after a gap everything is asked for again", () => {
    stage.model.say(deltaWith(1, { full: true, to: stage.model.sent[0]?.client ?? "" }));
    const n_sent = stage.model.sent.length;
    stage.model.say(deltaWith(3));
    expect(stage.model.sent.slice(n_sent).map((command) => command.do)).toEqual(["hello"]);
  });
});

describe("in the place of the finished picture", () => {
  const NAME = "hm-place-1";

  function picture(): HTMLElement {
    const around = document.createElement("div");
    around.className = "jp-RenderedHTMLCommon";
    around.innerHTML = `<div class="${NAME}"><p>the picture</p></div>`;
    document.body.append(around);
    return around;
  }

  function openAt(): FakeModel {
    stage.leave();
    const model = new FakeModel({ ...noTraits(), place: NAME });
    stage.open(model);
    return model;
  }

  test("the live view is shown once the kernel tells of the gang, and the picture when it goes", async () => {
    openAt();
    const around = picture();
    await stage.pass(50);
    expect(around.textContent).toBe("the picture");
    stage.say({ gang: gangWith(), full: true });
    await stage.pass(50);
    expect(around.querySelector<HTMLElement>(".hm-pill")?.dataset.state).toBe("running");
    expect(around.className).toBe("");
    stage.close();
    expect(around.textContent).toBe("the picture");
    expect(around.className).toBe("jp-RenderedHTMLCommon");
    around.remove();
  });

  test("a cell that is taken out of the document and put back shows it again", async () => {
    openAt();
    stage.say({ gang: gangWith(), full: true });
    const around = picture();
    await stage.pass(50);
    around.remove();
    await stage.pass(50);
    expect(around.textContent).toBe("the picture");
    document.body.append(around);
    await stage.pass(50);
    expect(around.querySelector(".hm-pill")).not.toBeNull();
    around.remove();
  });

  test("an output that is shown anew keeps the view with what the user has entered", async () => {
    openAt();
    stage.say({ gang: gangWith(), full: true, lines: [[0, 0, "first", 1]] });
    const around = picture();
    await stage.pass(50);
    const search = () => around.querySelector("input[type=search]") as HTMLInputElement;
    search().value = "fir";
    search().focus();
    around.innerHTML = `<div class="${NAME}"><p>the next picture</p></div>`;
    await stage.pass(50);
    expect([search().value, document.activeElement]).toEqual(["fir", search()]);
    stage.close();
    expect(around.textContent).toBe("the next picture");
    around.remove();
  });

  test("a notebook that is closed ends the view", async () => {
    const model = openAt();
    stage.say({ gang: gangWith(), full: true });
    const around = picture();
    await stage.pass(50);
    model.widget_manager = { context: { isDisposed: true } };
    await stage.pass(1000);
    expect(around.textContent).toBe("the picture");
    const n_asked = model.sent.length;
    await stage.pass(5000);
    expect(model.sent.length).toBe(n_asked);
    around.remove();
  });
});

describe("without a kernel", () => {
  test("the reader is told after a while", async () => {
    expect(stage.words).toBe("Starting…");
    await stage.pass(4100);
    expect(stage.words).toContain("No message from the kernel");
  });

  test("what the kernel has to say about it is shown", async () => {
    stage.leave();
    const model = new FakeModel();
    model.answer = (command) => model.ack(command, false, "others came after it");
    stage.open(model);
    await stage.pass(50);
    expect(stage.words).toBe("others came after it");
  });
});

test("what a server dropped is asked for again, until it comes", async () => {
  const hellos = () => stage.commands.filter((what) => what === "hello").length;
  stage.model.answer = (command) => stage.model.ack(command); // and all else is lost
  await stage.pass(5000);
  const n_asked = hellos();
  expect(n_asked).toBeGreaterThan(2);
  stage.say({ full: true, gang: gangWith() });
  await stage.pass(2000);
  expect(hellos()).toBe(n_asked);
  const now = performance.now();
  vi.spyOn(performance, "now").mockReturnValue(now + 3000); // messages come every second, or are lost
  await stage.pass(3000);
  expect(hellos()).toBeGreaterThan(n_asked);
});

test("the last part of a full message is requested again if it is lost", async () => {
  const hellos = () => stage.commands.filter((what) => what === "hello").length;
  stage.model.answer = (command) => stage.model.ack(command);
  await stage.pass(400); // the page repeats its first request
  const gang = gangWith({ state: "done", ended_s: 2 });
  stage.say({ full: true, gang, parts_left: 2 });
  stage.say({ parts_left: 1 });
  const n_asked = hellos();
  await stage.pass(14_000); // more parts may arrive: another hello would bring all of them again
  expect(hellos()).toBe(n_asked);
  await stage.pass(2000);
  expect(hellos()).toBeGreaterThan(n_asked);
  stage.say({ full: true, gang, parts_left: 1 });
  stage.say({ parts_left: 0 });
  const n_answered = hellos();
  await stage.pass(5000);
  expect(hellos()).toBe(n_answered);
});

test("a full message that lacks a part in between is not whole with its last part", async () => {
  const hellos = () => stage.commands.filter((what) => what === "hello").length;
  stage.model.answer = (command) => stage.model.ack(command);
  stage.say({ full: true, gang: gangWith({ state: "done", ended_s: 2 }), parts_left: 3 });
  stage.say({ parts_left: 1 });
  stage.say({ parts_left: 0 });
  const n_asked = hellos();
  await stage.pass(16_000);
  expect(hellos()).toBeGreaterThan(n_asked);
});
