import { render } from "preact";
import { act } from "preact/test-utils";
import { afterEach, describe, expect, it, vi } from "vitest";
import type { Ack } from "../src/protocol";
import { SpanStore } from "../src/timeline/store";
import { Timeline } from "../src/timeline/Timeline";
import { NAMES, packSpans, trainingSpans } from "./data";
import { THEME } from "./scenes";
import { eventually } from "./wait";

function storeWith(n_ranks: number): SpanStore {
  const store = new SpanStore();
  const lanes = Array.from({ length: n_ranks }, (_, rank) => ({
    rank,
    track: "spans",
    spans: trainingSpans(rank, 20),
  }));
  const { deltas, buffers } = packSpans(lanes);
  store.apply(NAMES, deltas, buffers);
  return store;
}

const REFUSED: Ack = { kind: "ack", to: "", id: "", ok: false, text: "nothing was recorded" };

function shown(
  store: SpanStore,
  isLive = false,
  root: HTMLElement = document.body.appendChild(document.createElement("div")),
) {
  const ask = vi.fn(async () => REFUSED);
  act(() => {
    render(
      <Timeline
        store={store}
        version={1}
        theme={THEME}
        ask={ask}
        np={2}
        isLive={isLive}
        isPaged={false}
        phaseOf={() => ""}
        nowS={() => store.endS}
      />,
      root,
    );
  });
  return { root, ask };
}

const button = (root: HTMLElement, word: string) =>
  [...root.querySelectorAll("button")].find(
    (b) => b.textContent === word || b.getAttribute("aria-label") === word,
  ) as HTMLButtonElement;

const isPressed = (root: HTMLElement, word: string) =>
  button(root, word).getAttribute("aria-pressed") === "true";

function press(root: HTMLElement, key: string): void {
  const canvas = root.querySelector("canvas") as HTMLCanvasElement;
  act(() => {
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  });
}

afterEach(() => {
  for (const root of [...document.body.children]) {
    render(null, root);
    root.remove();
  }
});

describe("the timeline", () => {
  it("is not there without lanes", () => {
    expect(shown(new SpanStore()).root.textContent).toBe("");
  });

  it("is moved by keys and by buttons", () => {
    const { root } = shown(storeWith(2));
    expect(isPressed(root, "Fit")).toBe(true);
    press(root, "+");
    expect(isPressed(root, "Fit")).toBe(false);
    press(root, "0");
    expect(isPressed(root, "Fit")).toBe(true);
    act(() => button(root, "zoom in").click());
    expect(isPressed(root, "Fit")).toBe(false);
  });

  it("follows a live run when asked to, and offers it only then", () => {
    expect(button(shown(storeWith(1)).root, "Follow")).toBeUndefined();
    const { root } = shown(storeWith(2), true);
    press(root, "End");
    expect(isPressed(root, "Follow")).toBe(true);
    press(root, "ArrowLeft");
    expect(isPressed(root, "Follow")).toBe(false);
  });

  it("tells where the time goes, in words too", async () => {
    const { root } = shown(storeWith(2));
    await eventually(() => expect(root.querySelectorAll(".hm-where-row").length).toBe(2));
    expect(root.querySelector(".hm-where-bar b")?.textContent).toMatch(/^\d+ %$/);
    expect(root.querySelector(".hm-name")?.textContent).toMatch(/^backward\d+ %$/);
    await eventually(() =>
      expect(root.querySelector("canvas")?.getAttribute("aria-label")).toMatch(
        /^Timeline of 2 ranks, .*backward \d+ %/,
      ),
    );
  });

  it("shows sixteen ranks at a time", () => {
    const { root } = shown(storeWith(20));
    expect(root.textContent).toContain("ranks 0–15 of 20");
    act(() => button(root, "ranks after").click());
    expect(root.textContent).toContain("ranks 16–19 of 20");
    expect(button(root, "ranks after").disabled).toBe(true);
  });

  it("shows the same ranks when it is created again", () => {
    const store = storeWith(20);
    const { root } = shown(store);
    act(() => button(root, "ranks after").click());
    render(null, root);
    expect(shown(store).root.textContent).toContain("ranks 16–19 of 20");
  });

  it("moves to the steps of a new profile, and not when more of its spans arrive later", () => {
    const store = storeWith(2);
    const { root } = shown(store);
    const profile = (sinceS: number, startS: number) => {
      const spans = [{ startS, durationS: 0.01, name: 0, depth: 0 }];
      const { deltas, buffers } = packSpans([{ rank: 0, track: "profiler", spans }]);
      store.profiledSinceS = sinceS;
      store.apply([], deltas, buffers);
      shown(store, false, root);
    };
    const isAt = () => root.textContent?.includes("the profiled steps");
    profile(0.5, 0.6);
    expect([isAt(), isPressed(root, "Fit")]).toEqual([true, false]);
    profile(0.5, 0.7); // another rank's, while the view shows them
    expect([isAt(), isPressed(root, "Fit")]).toEqual([true, false]);
    press(root, "0");
    profile(0.5, 0.8);
    expect(isPressed(root, "Fit")).toBe(true);
    profile(1.5, 1.6);
    expect([isAt(), isPressed(root, "Fit")]).toEqual([true, false]);
    press(root, "0");
    act(() => button(root, "Profile").click());
    expect([isAt(), isPressed(root, "Fit")]).toEqual([true, false]);
  });

  it("says why there is no trace", async () => {
    const { root, ask } = shown(storeWith(1));
    act(() => button(root, "Trace").click());
    await eventually(() => expect(root.textContent).toContain("nothing was recorded"));
    expect(ask).toHaveBeenCalledWith({ do: "trace" });
  });
});
