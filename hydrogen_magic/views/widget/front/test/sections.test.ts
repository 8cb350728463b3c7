import { describe, expect, test } from "vitest";
import { gangWith, lineOf, packed, rankWith } from "./kernel";
import { setStage } from "./stage";

const stage = setStage();

describe("ranks", () => {
  const bar = { desc: "epoch 1", n: 3, total: 12, unit: "it", per_s: 2 };

  test("have progress that a screen reader can tell, and aligned figures", () => {
    const metrics = { loss: 0.5, accuracy: "nan" as const };
    stage.say({ gang: gangWith(), ranks: [rankWith(1, { bar, metrics }), rankWith(0, { bar })] });
    const track = stage.find('[role="progressbar"]');
    expect(track.getAttribute("aria-valuenow")).toBe("3");
    expect(track.getAttribute("aria-valuemax")).toBe("12");
    const rows = stage.all("tbody tr");
    expect(rows[0]).toContain("rank 0");
    expect(rows[1]).toContain("3/120.5000nan");
  });

  test.each(["straggler", "stopped", "dead"] as const)(
    "%s is said in a word with a shape",
    (mark) => {
      stage.say({ gang: gangWith(), ranks: [rankWith(0, { mark, doing: "backward" })] });
      const state = stage.find("td.hm-state");
      expect(state.textContent).toBe(`${mark} · backward`);
      expect(state.querySelector("svg")).not.toBeNull();
    },
  );

  test("past sixteen are a grid, in which keys move and Enter asks for a row", async () => {
    const summary = {
      counts: { running: 20 },
      phases: ["running"],
      shown: [4],
      chosen: [4],
      at: 0,
    };
    const columns = packed(new Uint8Array(20), new Uint8Array(20).fill(50), new Uint8Array(20));
    stage.say({ gang: gangWith({ np: 20 }), summary, ranks: [rankWith(4), rankWith(5)] }, [
      columns,
    ]);
    expect(stage.el.querySelectorAll("tbody tr")).toHaveLength(1);
    const canvas = stage.find("canvas");
    stage.press(canvas, "Home");
    stage.press(canvas, "ArrowRight");
    expect(stage.find(".hm-rank-grid-told").textContent).toBe("rank 1 · running · 50 %");
    stage.press(canvas, "Enter");
    await stage.pass(20);
    stage.press(canvas, "ArrowRight");
    stage.press(canvas, "Enter");
    await stage.pass(20);
    const rows = stage.model.sent.filter((command) => command.do === "rows");
    expect(rows.map(({ ranks }) => ranks)).toEqual([
      [4, 1],
      [4, 1, 2],
    ]);
  });
});

function write(input: HTMLInputElement, text: string): void {
  input.value = text;
  stage.dispatch(input, new Event("input", { bubbles: true }));
}

/** Gives an element a height and a scroll position, which happy-dom does not compute. */
function laidOut(element: HTMLElement) {
  const place = { scrollHeight: 1000, clientHeight: 200, scrollTop: 800 };
  for (const key of ["scrollHeight", "clientHeight", "scrollTop"] as const) {
    Object.defineProperty(element, key, {
      get: () => place[key],
      set: (value: number) => {
        place[key] = Math.min(value, 800);
      },
      configurable: true,
    });
  }
  const scroll = (to: number) => {
    place.scrollTop = to;
    stage.dispatch(element, new Event("scroll"));
  };
  return { place, scroll };
}

const many = (n: number) => Array.from({ length: n }, () => lineOf(0, "other"));

const isFollowing = () => stage.button("Follow")?.getAttribute("aria-pressed");

function showRank(rank: number): void {
  const select = stage.find<HTMLSelectElement>(".hm-output select");
  select.value = String(rank);
  stage.dispatch(select, new Event("change", { bubbles: true }));
}

describe("output", () => {
  const lines = [
    lineOf(0, "alpha \x1b[31mred\x1b[0m"),
    lineOf(1, "beta Alpha"),
    lineOf(0, "gamma", 1),
  ];

  test("is shown with its colours as text", () => {
    stage.say({ gang: gangWith(), lines });
    const rows = [...stage.el.querySelectorAll(".hm-row")];
    expect(rows.map((row) => row.querySelector(".hm-text")?.textContent)).toEqual([
      "alpha red\n",
      "beta Alpha\n",
      "gamma\n",
    ]);
    expect(rows[0]?.querySelector(".hm-sgr-fg")?.textContent).toBe("red");
    expect(rows[2]?.getAttribute("data-stream")).toBe("stderr");
  });

  test("is searched with marks and a count, and stepped through", () => {
    stage.say({ gang: gangWith(), lines });
    const input = stage.find<HTMLInputElement>(".hm-search input");
    write(input, "alpha");
    expect(stage.all("mark")).toEqual(["alpha", "Alpha"]);
    expect(stage.find(".hm-search .hm-note").textContent).toBe("1 of 2");
    stage.press(input, "Enter");
    expect(stage.find(".hm-search .hm-note").textContent).toBe("2 of 2");
    expect(stage.find("mark.hm-current").textContent).toBe("Alpha");
    write(input, "omega");
    expect(stage.find(".hm-search .hm-note").textContent).toBe("none");
  });

  test("keeps the hit that the user has chosen when old lines are removed", () => {
    const hit = lineOf(1, "loss");
    stage.say({ gang: gangWith(), lines: [hit] });
    showRank(1); // 5,000 rows of others would take long
    stage.say({ lines: [...many(3000), hit, ...many(2000), hit, ...many(400)] });
    const input = stage.find<HTMLInputElement>(".hm-search input");
    write(input, "loss");
    stage.press(input, "Enter");
    const told = () => stage.find(".hm-search .hm-note").textContent;
    const row = () =>
      stage.find("mark.hm-current").closest("[data-line]")?.getAttribute("data-line");
    expect([told(), row()]).toEqual(["2 of 3", "3001"]);
    stage.say({ lines: many(400) });
    expect([told(), row()]).toEqual(["1 of 2", "3001"]);
  });

  test("does not move when the line of the current hit is removed", () => {
    stage.say({ gang: gangWith(), lines: [lineOf(1, "loss")] });
    showRank(1);
    stage.say({ lines: [...many(3000), lineOf(1, "loss"), ...many(2000)] });
    write(stage.find<HTMLInputElement>(".hm-search input"), "loss");
    expect(isFollowing()).toBe("false");
    stage.click("Follow");
    stage.say({ lines: many(1000) });
    expect(stage.find(".hm-search .hm-note").textContent).toBe("1 of 1");
    expect(isFollowing()).toBe("true");
  });

  test("can be one rank's, and its file is asked for", async () => {
    stage.say({ gang: gangWith(), lines });
    showRank(1);
    expect(stage.all(".hm-row")).toEqual(["1beta Alpha\n"]);
    stage.click("Whole file");
    await stage.pass(1);
    expect(stage.model.sent.find((command) => command.do === "log")).toMatchObject({ rank: 1 });
  });

  test("follows its end, lets go when scrolled up, and takes hold again at the end", () => {
    stage.say({ gang: gangWith(), lines });
    const { place, scroll } = laidOut(stage.find(".hm-log"));
    stage.say({ lines: [lineOf(0, "more")] });
    expect([place.scrollTop, isFollowing()]).toEqual([800, "true"]);
    scroll(300);
    stage.say({ lines: [lineOf(0, "more")] });
    expect([place.scrollTop, isFollowing()]).toEqual([300, "false"]);
    scroll(798);
    stage.say({ lines: [lineOf(0, "more")] });
    expect([place.scrollTop, isFollowing()]).toEqual([800, "true"]);
  });

  test("follows its end after it was unfolded, though nothing is printed any more", () => {
    stage.say({ gang: gangWith({ state: "done", ended_s: 2 }), lines });
    stage.click("Output");
    stage.click("Output");
    const { place, scroll } = laidOut(stage.find(".hm-log"));
    scroll(800);
    scroll(300);
    expect(isFollowing()).toBe("false");
    stage.click("Follow");
    expect([place.scrollTop, isFollowing()]).toEqual([800, "true"]);
  });
});
