import { act } from "preact/test-utils";
import { afterEach, beforeEach, vi } from "vitest";
import widget from "../src/index";
import type { Model } from "../src/page";
import type { Delta } from "../src/protocol";
import { deltaWith, FakeModel } from "./kernel";

/** A page with the widget in it, and a kernel that says what a test has it say. */
export class Stage {
  model = new FakeModel();
  el: HTMLElement = document.createElement("div");
  private shown = widget();
  private end = () => {};
  private dispose: () => void = () => {};
  private seq = 0;

  /** The notebook makes the widget and shows it. */
  open(model = new FakeModel()): void {
    act(() => this.dispose()); // another widget would look for the same place
    this.model = model;
    this.seq = 0;
    this.shown = widget();
    this.dispose = this.shown.initialize({ model: model as unknown as Model });
    this.show();
  }

  show(): void {
    this.el = document.body.appendChild(document.createElement("div"));
    act(() => {
      this.end = this.shown.render({ model: this.model as unknown as Model, el: this.el });
    });
  }

  leave(): void {
    this.end();
    this.el.remove();
  }

  /** The widget itself is taken away. */
  close(): void {
    this.leave();
    act(() => this.dispose());
    this.dispose = () => {};
  }

  /** Has the kernel say something, and the page paint it. */
  say(changes: Partial<Delta>, buffers: ArrayBuffer[] = []): void {
    this.seq += 1;
    act(() => {
      this.model.say(deltaWith(this.seq, changes), buffers);
      vi.advanceTimersByTime(20);
    });
  }

  async pass(ms: number): Promise<void> {
    await act(async () => {
      await vi.advanceTimersByTimeAsync(ms);
    });
  }

  find<E extends HTMLElement>(selector: string): E {
    const found = this.el.querySelector<E>(selector);
    if (found === null) throw new Error(`there is no ${selector} in ${this.el.innerHTML}`);
    return found;
  }

  all(selector: string): string[] {
    return [...this.el.querySelectorAll(selector)].map((element) => element.textContent ?? "");
  }

  button(name: string): HTMLElement | undefined {
    return [...this.el.querySelectorAll("button")].find((b) => b.textContent?.includes(name));
  }

  click(name: string): void {
    act(() => this.button(name)?.click());
  }

  dispatch(element: HTMLElement, event: Event): void {
    act(() => {
      element.dispatchEvent(event);
    });
  }

  press(element: HTMLElement, key: string): void {
    this.dispatch(element, new KeyboardEvent("keydown", { key, bubbles: true }));
  }

  get words(): string {
    return this.el.querySelector(".hm")?.textContent ?? "";
  }

  get commands(): string[] {
    return this.model.sent.map((command) => command.do);
  }
}

/** A stage for every test of a file, with timers and a clock that advance when the test says so. */
export function setStage(): Stage {
  const stage = new Stage();
  beforeEach(() => {
    vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "setInterval", "clearInterval"] });
    vi.spyOn(performance, "now").mockReturnValue(1000);
    vi.stubGlobal("requestAnimationFrame", (paint: () => void) => setTimeout(paint, 16));
    localStorage.clear();
    document.body.dataset.jpThemeLight = "true";
    stage.open();
  });
  afterEach(() => {
    stage.close();
    vi.useRealTimers();
    vi.unstubAllGlobals();
    vi.restoreAllMocks();
  });
  return stage;
}
