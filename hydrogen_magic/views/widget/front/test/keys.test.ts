import { afterEach, expect, test, vi } from "vitest";
import { gangWith, lineOf } from "./kernel";
import { setStage } from "./stage";

const stage = setStage();
/** What the notebook hears, after all elements or before them, and whether it was told to leave it. */
const heard = vi.fn();
const suppressed = vi.fn();

function press(element: HTMLElement, key: string, modifiers: KeyboardEventInit = {}): void {
  const before = () => suppressed(element.closest("[data-lm-suppress-shortcuts]") !== null);
  document.addEventListener("keydown", before, { capture: true, once: true });
  document.addEventListener("keydown", heard, { once: true });
  stage.dispatch(element, new KeyboardEvent("keydown", { key, bubbles: true, ...modifiers }));
  document.removeEventListener("keydown", heard);
}

afterEach(() => {
  heard.mockClear();
  suppressed.mockClear();
});

test("keys where something scrolls or is typed in stay here", async () => {
  stage.say({ gang: gangWith(), lines: [lineOf(0, "hello")] });
  await stage.pass(20);
  for (const place of [".hm-log", ".hm-output input", ".hm-output select"]) {
    const element = stage.find(place);
    element.focus();
    press(element, "0");
    expect(heard).not.toHaveBeenCalled();
    expect(suppressed).toHaveBeenLastCalledWith(true);
  }
});

test("what saves the notebook does so from here too", async () => {
  stage.say({ gang: gangWith(), lines: [lineOf(0, "hello")] });
  await stage.pass(20);
  press(stage.find(".hm-log"), "s", { ctrlKey: true });
  expect(heard).toHaveBeenCalledOnce();
  expect(suppressed).toHaveBeenLastCalledWith(false);
});

test.each([
  ["a click", false],
  ["the keyboard", true],
])("keys on a button that got the focus by %s", async (_, isByKeyboard) => {
  stage.say({ gang: gangWith() });
  await stage.pass(20);
  const button = stage.button("Stacks") as HTMLElement;
  vi.spyOn(button, "matches").mockImplementation((s) => isByKeyboard && s === ":focus-visible");
  stage.dispatch(button, new FocusEvent("focusin", { bubbles: true }));
  press(button, "d");
  expect(heard).toHaveBeenCalledTimes(isByKeyboard ? 0 : 1);
  expect(suppressed).toHaveBeenLastCalledWith(isByKeyboard);
});

test("keys elsewhere in the notebook are the notebook's", () => {
  stage.say({ gang: gangWith() });
  press(document.body, "d");
  expect(heard).toHaveBeenCalledOnce();
  expect(suppressed).toHaveBeenLastCalledWith(false);
});
