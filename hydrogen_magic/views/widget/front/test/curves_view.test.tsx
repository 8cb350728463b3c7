import { render } from "preact";
import { act } from "preact/test-utils";
import { afterEach, describe, expect, it, vi } from "vitest";
import { Curves } from "../src/curves";
import { CurveStore } from "../src/curves/store";
import type { Ack } from "../src/protocol";
import { THEME } from "./bench/scenes";
import { packCurve } from "./demo/data";

function storeWith(names: readonly string[]): CurveStore {
  const store = new CurveStore();
  for (const name of names) {
    const bucket = { key: 0, count: 1, mean: 1, min: 1, max: 1 };
    const { delta, buffers } = packCurve(name, 1, [
      { rank: 0, buckets: [bucket] },
      { rank: 1, buckets: [bucket] },
    ]);
    store.apply([delta], buffers);
  }
  return store;
}

function shown(store: CurveStore, ask: (order: unknown) => Promise<Ack>): HTMLElement {
  const root = document.createElement("div");
  document.body.append(root);
  act(() => {
    render(
      <Curves
        store={store}
        ranks={new Map()}
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

afterEach(() => {
  for (const root of [...document.body.children]) {
    render(null, root);
    root.remove();
  }
  vi.restoreAllMocks();
});

describe("the section of curves", () => {
  it("is not there without data", () => {
    expect(shown(new CurveStore(), async () => ack(true)).textContent).toBe("");
  });

  it("lets the reader choose when there are many metrics", () => {
    const root = shown(storeWith([..."abcdefgh"]), async () => ack(true));
    expect(root.querySelector("summary")?.textContent).toBe("6 of 8 metrics");
    const boxes = [...root.querySelectorAll<HTMLInputElement>(".hm-chooser input")];
    act(() => boxes[7]?.click());
    expect(root.querySelector("summary")?.textContent).toBe("7 of 8 metrics");
  });

  it("switches between mean and ranks", () => {
    const root = shown(storeWith(["loss"]), async () => ack(true));
    const pressed = (word: string) => button(root, word).getAttribute("aria-pressed");
    expect([pressed("mean"), pressed("both")]).toEqual(["false", "true"]);
    act(() => button(root, "mean").click());
    expect([pressed("mean"), pressed("both")]).toEqual(["true", "false"]);
  });

  it("saves what it knows when the kernel refuses the table", async () => {
    const blobs: Blob[] = [];
    vi.spyOn(URL, "createObjectURL").mockImplementation((blob) => {
      blobs.push(blob as Blob);
      return "blob:made";
    });
    const ask = vi.fn(async () => ack(false, "no disk"));
    const root = shown(storeWith(["loss"]), ask);
    act(() => button(root, "CSV").click());
    await vi.waitFor(() => expect(root.textContent).toContain("the kernel said: no disk"));
    expect(ask).toHaveBeenCalledWith({ do: "csv" });
    expect(await blobs[0]?.text()).toContain("loss,1,0,1,0,1,1,1,1");
  });
});
