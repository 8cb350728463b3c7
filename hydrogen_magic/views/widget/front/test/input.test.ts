import { describe, expect, it, vi } from "vitest";
import type { Traits } from "../src/protocol";
import { FakeModel, noTraits } from "./kernel";
import { setStage } from "./stage";

const stage = setStage();

/** A model of JupyterLab, and what the page has it do. */
function inLab(traits: Partial<Traits> = {}) {
  const model = new FakeModel({ ...noTraits(), ...traits });
  const removeInputGuard = vi.fn();
  const session = { kernel: { removeInputGuard } };
  model.widget_manager = { context: { sessionContext: { session } } };
  return { model, removeInputGuard };
}

describe("a question to the user that has ended without an answer", () => {
  it("no longer keeps the notebook from running cells", () => {
    const { model, removeInputGuard } = inLab();
    stage.open(model);
    expect(removeInputGuard).not.toHaveBeenCalled();
    model.set("withdrawn", 1);
    model.set("withdrawn", 2);
    expect(removeInputGuard).toHaveBeenCalledTimes(2);
  });

  it("may have ended while the page was loading", () => {
    const { model, removeInputGuard } = inLab({ withdrawn: 1 });
    stage.open(model);
    expect(removeInputGuard).toHaveBeenCalledTimes(1);
  });

  it("is none of a cell that came later", () => {
    const { model, removeInputGuard } = inLab({ withdrawn: 1, blocking: false });
    stage.open(model);
    model.set("blocking", false);
    expect(removeInputGuard).not.toHaveBeenCalled();
  });

  it("is nothing to a page that is closed, nor to other front ends", () => {
    const { model, removeInputGuard } = inLab();
    stage.open(model);
    stage.close();
    model.set("withdrawn", 1);
    expect(removeInputGuard).not.toHaveBeenCalled();
    for (const manager of [{}, { context: { sessionContext: { session: null } } }]) {
      const other = new FakeModel();
      other.widget_manager = manager;
      stage.open(other);
      expect(() => other.set("withdrawn", 1)).not.toThrow();
    }
  });
});
