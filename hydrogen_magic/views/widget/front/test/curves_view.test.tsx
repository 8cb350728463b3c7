import { render } from "preact";
import { act } from "preact/test-utils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { Curves } from "../src/curves/Curves";
import type { PlotInput } from "../src/curves/plot";
import { CurveStore } from "../src/curves/store";
import { type Ack, ALL_RANKS, type Rank } from "../src/protocol";
import { packCurve } from "./data";
import { rankWith } from "./kernel";
import { THEME } from "./scenes";
import { eventually } from "./wait";

const held = vi.hoisted(() => ({ look: (_: [number, number]) => {} }));

/** happy-dom has no canvas to draw on. */
vi.mock("../src/curves/plot", () => ({
  Plot: class {
    canvas = document.createElement("canvas");
    constructor(_element: unknown, _key: unknown, actions: typeof held) {
      held.look = actions.look;
    }
    paint({ shape }: PlotInput) {
      this.canvas.title = `${shape.steps.length} steps`;
    }
    end() {}
  },
}));

function storeWith(names: readonly string[]): CurveStore {
  const store = new CurveStore();
  for (const name of names) {
    const bucket = { key: 0, count: 1, mean: 1, min: 1, max: 1 };
    const { delta, buffers } = packCurve(name, 1, [
      { rank: 0, buckets: [bucket] },
      { rank: 1, buckets: [bucket] },
      { rank: ALL_RANKS, buckets: [{ ...bucket, count: 2 }] },
    ]);
    store.apply([delta], buffers);
  }
  return store;
}

function shown(
  store: CurveStore,
  ask: (command: unknown) => Promise<Ack>,
  ranks: ReadonlyMap<number, Rank> = new Map(),
  root: HTMLElement = document.body.appendChild(document.createElement("div")),
): HTMLElement {
  act(() => {
    render(
      <Curves
        store={store}
        ranks={ranks}
        version={1}
        theme={THEME}
        ask={ask}
        np={2}
        isLive
        gangId="g1"
      />,
      root,
    );
  });
  return root;
}

const ack = (ok: boolean, text = ""): Ack => ({ kind: "ack", to: "", id: "", ok, text });
const button = (root: HTMLElement, word: string) =>
  [...root.querySelectorAll("button")].find((b) => b.textContent === word) as HTMLButtonElement;

beforeEach(() => {
  // happy-dom lays nothing out
  vi.spyOn(HTMLElement.prototype, "clientWidth", "get").mockReturnValue(900);
  localStorage.clear();
});

afterEach(() => {
  for (const root of [...document.body.children]) {
    render(null, root);
    root.remove();
  }
  vi.restoreAllMocks();
});

describe("a range that the user has zoomed to", () => {
  const WIDTH = 64;
  const buckets = (from: number, until: number, width: number) =>
    Array.from({ length: Math.ceil((until - from) / width) }, (_, k) => {
      const count = Math.min(width, until - from - k * width);
      return { key: from / width + k, count, mean: 1, min: 1, max: 1 };
    });

  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  it.each([
    [
      [1984, 2047],
      [2001, 2021, 2041, 2201, 5001],
    ],
    [
      [1500, 2047],
      [1991, 2011, 2048, 3001, 9001],
    ],
    [
      [1900, 2047],
      [1991, 2011],
    ],
  ] as const)("%j has every step that was logged later", async (range, ends) => {
    const store = new CurveStore();
    let n_steps = 0;
    const ask = vi.fn(async (command: unknown) => {
      const { from, until } = command as { from: number; until: number };
      const { delta, buffers } = packCurve("loss", 1, [
        { rank: 0, buckets: buckets(from, Math.min(until, n_steps), 1) },
      ]);
      store.applyDetail({ ...delta, kind: "detail", to: "", id: "", from, until }, buffers);
      return ack(true);
    });
    const root = shown(store, ask);
    const log = async (n: number) => {
      n_steps = n;
      const { delta, buffers } = packCurve("loss", WIDTH, [
        { rank: 0, buckets: buckets(0, n, WIDTH) },
      ]);
      store.apply([delta], buffers);
      for (let k = 0; k < 5; k++) {
        shown(store, ask, new Map(), root);
        await act(async () => void (await vi.advanceTimersByTimeAsync(500)));
      }
    };
    await log(ends[0]);
    act(() => held.look([range[0], range[1]]));
    for (const n of ends) await log(n);
    const detail = store.detailFor("loss", range[0], range[1])?.metric.series.get(0);
    expect(detail?.keys[detail.n - 1]).toBeGreaterThanOrEqual(Math.min(range[1], n_steps - 1));
    const n_requests = ask.mock.calls.length;
    await log(n_steps + 5000);
    await log(n_steps + 5000);
    expect(ask.mock.calls.length).toBeLessThanOrEqual(n_requests + 2);
  });
});

describe("the section of curves", () => {
  it("is not there without data", () => {
    expect(shown(new CurveStore(), async () => ack(true)).textContent).toBe("");
  });

  it("groups, finds and pins metrics, and remembers what was folded and pinned", () => {
    const store = storeWith([..."abcd", ...[..."efgh"].map((n) => `x/${n}`)]);
    const captions = (root: HTMLElement) =>
      [...root.querySelectorAll(".hm-group-caption")].map((one) => one.textContent);
    const charts = (root: HTMLElement) =>
      [...root.querySelectorAll("figcaption b")].map((one) => one.textContent);
    const root = shown(store, async () => ack(true));
    expect(captions(root)).toEqual(["metrics (4)", "x (4)"]);
    expect(charts(root)).toEqual([..."abcdefgh"]);
    act(() => button(root, "x (4)").click());
    act(() => root.querySelector<HTMLButtonElement>('[aria-label="Pin c"]')?.click());
    expect(captions(root)).toEqual(["pinned (1)", "metrics (3)", "x (4)"]);
    expect(charts(root)).toEqual([..."cabd"]);
    const again = shown(store, async () => ack(true));
    expect(charts(again)).toEqual([..."cabd"]);
    const input = again.querySelector<HTMLInputElement>('[type="search"]') as HTMLInputElement;
    input.value = "X/";
    act(() => void input.dispatchEvent(new Event("input", { bubbles: true })));
    expect(charts(again)).toEqual([..."efgh"]);
  });

  it("never says that ranks are the same where one has NaN", () => {
    const bucket = { key: 0, count: 1, mean: 1, min: 1, max: 1 };
    const store = new CurveStore();
    const { delta, buffers } = packCurve("loss", 1, [
      { rank: ALL_RANKS, buckets: [bucket] },
      { rank: 0, buckets: [bucket] },
      { rank: 1, buckets: [], badStep: 0 },
    ]);
    store.apply([delta], buffers);
    const root = shown(
      store,
      async () => ack(true),
      new Map([[1, rankWith(1, { metrics: { loss: "nan" } })]]),
    );
    expect(root.textContent).toContain("NaN or infinite, first at step 0, rank 1");
    expect(root.textContent).not.toContain("the same on all ranks");
    expect(root.querySelector('[title="rank 1"]')?.textContent).toBe("1NaN");
  });

  it("says where values stopped being finite if none ever was", () => {
    const store = new CurveStore();
    const { delta, buffers } = packCurve("loss", 1, [{ rank: 0, buckets: [], badStep: 0 }]);
    store.apply([delta], buffers);
    const root = shown(store, async () => ack(true));
    expect(root.textContent).toContain("NaN or infinite, first at step 0, rank 0");
  });

  it("names the only rank of a large gang that has a line", () => {
    const at = (mean: number) => [{ key: 0, count: 1, mean, min: mean, max: mean }];
    const legend = (...series: Parameters<typeof packCurve>[2]) => {
      const store = new CurveStore();
      const { delta, buffers } = packCurve("loss", 1, series);
      store.apply([delta], buffers);
      return shown(store, async () => ack(true)).querySelector(".hm-chart-values")?.textContent;
    };
    const first = { rank: 0, buckets: at(1) };
    expect(legend(first)).toBe("");
    expect(legend(first, { rank: ALL_RANKS, buckets: at(1) })).toBe("");
    expect(legend(first, { rank: ALL_RANKS, buckets: at(2) })).toBe("01.000");
  });

  it("switches between mean and ranks", () => {
    const root = shown(storeWith(["loss"]), async () => ack(true));
    const pressed = (word: string) => button(root, word).getAttribute("aria-pressed");
    expect([pressed("mean"), pressed("both")]).toEqual(["false", "true"]);
    act(() => button(root, "mean").click());
    expect([pressed("mean"), pressed("both")]).toEqual(["true", "false"]);
  });

  it("keeps the lines of ranks when every rank of a large gang has NaN", () => {
    const ranks = Array.from({ length: 64 }, (_, rank) => ({ rank, buckets: [], badStep: 5 }));
    const store = storeWith(["loss"]);
    const { delta, buffers } = packCurve("loss", 1, ranks);
    store.apply([delta], buffers);
    const root = shown(store, async () => ack(true));
    expect(button(root, "both").getAttribute("aria-pressed")).toBe("true");
  });

  it("has charts in its picture as they are now, and says so when there is no picture", async () => {
    const drawn: string[] = [];
    const drawing = {
      drawImage: (canvas: HTMLCanvasElement) => void drawn.push(canvas.title),
      measureText: () => ({ width: 10 }),
    };
    const ctx = new Proxy(drawing, {
      get: (known, name) => Reflect.get(known, name) ?? (() => {}),
    });
    vi.spyOn(HTMLCanvasElement.prototype, "getContext").mockReturnValue(ctx as never);
    const made: (Blob | null)[] = [new Blob(["png"]), null];
    vi.spyOn(HTMLCanvasElement.prototype, "toBlob").mockImplementation((done) =>
      done(made.shift() ?? null),
    );
    const saved = vi.spyOn(URL, "createObjectURL").mockReturnValue("blob:made");
    const store = storeWith(["loss", "acc"]);
    const root = shown(store, async () => ack(true)); // no frame has painted a chart
    act(() => button(root, "PNG").click());
    expect(drawn).toEqual(["1 steps", "1 steps"]);
    await eventually(() => expect(saved).toHaveBeenCalledTimes(1));
    act(() => button(root, "PNG").click());
    await eventually(() => expect(root.textContent).toContain("no picture was saved"));
    expect(saved).toHaveBeenCalledTimes(1);
  });

  it("says why the kernel refuses the table", async () => {
    const ask = vi.fn(async () => ack(false, "no disk"));
    const root = shown(storeWith(["loss"]), ask);
    act(() => button(root, "CSV").click());
    await eventually(() => expect(root.textContent).toContain("no table was saved: no disk"));
    expect(ask).toHaveBeenCalledWith({ do: "csv" });
  });
});
