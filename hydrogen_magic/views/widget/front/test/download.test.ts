import { expect, test } from "vitest";
import { Files, PART_PATIENCE } from "../src/download";
import type { FilePart } from "../src/protocol";

const part = (k: number, id = "a"): FilePart => ({
  kind: "file",
  to: "me",
  id,
  name: `${id}.csv`,
  mime: "text/csv",
  part: k,
  parts: 3,
});
const view = (text: string) => new DataView(new TextEncoder().encode(text).buffer);

test("a file is put together in order, whatever order its parts come in", async () => {
  const saved: [Blob, string][] = [];
  const files = new Files((blob, name) => void saved.push([blob, name]));
  files.take(part(2), [view("three")]);
  files.take(part(0), [view("one ")]);
  files.take(part(0, "b"), [view("other")]);
  files.take(part(0), [view("one ")]);
  expect(saved).toEqual([]);
  files.take(part(1), [view("two ")]);
  expect(saved.map(([, name]) => name)).toEqual(["a.csv"]);
  expect(await saved[0]?.[0].text()).toBe("one two three");
  expect(saved[0]?.[0].type).toBe("text/csv");
});

test("a file is lost when its parts stop arriving, and never when it was saved", () => {
  let n_saved = 0;
  const files = new Files(() => void n_saved++);
  const checks = (n: number) => Array.from({ length: n }, () => files.dropLost());
  for (const k of [0, 1, 2]) files.take(part(k, "saved"), [view("")]);
  files.expect("saved"); // the first answer was lost
  files.expect("b");
  checks(PART_PATIENCE - 1);
  files.take(part(0, "b"), [view("one")]);
  files.expect("c"); // sent after b
  checks(PART_PATIENCE - 1);
  files.take(part(1, "b"), [view("two")]);
  expect(checks(PART_PATIENCE - 1)).not.toContain(true);
  expect(checks(PART_PATIENCE)).toEqual([true, ...new Array(PART_PATIENCE - 1).fill(false)]);
  for (const k of [0, 1, 2]) files.take(part(k, "b"), [view("late")]);
  expect(n_saved).toBe(1);
});
