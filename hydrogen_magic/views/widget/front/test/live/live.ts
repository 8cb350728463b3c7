/**
 * The view with a kernel that is played, to look at it and to photograph it:
 * `live.html#running`, `#failed`, `#stopped`, `#many`, `#hostile`, `#starting`; `#running,dark`.
 *
 * esbuild test/live/live.ts --bundle --loader:.css=text --outfile=live.js, beside live.html
 */

import widget from "../../src/index";
import type { Model } from "../../src/page";
import type { Delta, Sent } from "../../src/protocol";
import { FakeModel } from "../kernel";
import { type Scene, type Sending, scenes } from "./scenes";

const [name = "running", look] = location.hash.slice(1).split(",");
document.body.dataset.jpThemeLight = String(look !== "dark");

const model = new FakeModel();
const scene: Scene = (scenes[name] ?? scenes.running)();
let seq = 0;

function say(sending: Sending | null): void {
  if (sending === null) return;
  seq += 1;
  const delta: Delta = { kind: "delta", seq, ...sending.content };
  model.say(delta, sending.buffers);
}

model.answer = (command: Sent) => {
  model.ack(command);
  const reaction = scene.react?.(command);
  if (reaction) setTimeout(() => say(reaction), 30);
};

const view = widget();
const el = document.getElementById("view") as HTMLElement;
view.initialize({ model: model as unknown as Model });
view.render({ model: model as unknown as Model, el });
say(scene.whole());
if (scene.tick) setInterval(() => say(scene.tick?.() ?? null), 100);
