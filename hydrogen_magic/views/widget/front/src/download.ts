import { valueAt } from "./maps";
import type { FilePart } from "./protocol";

/** Makes the browser save a blob under a name. */
export function save(blob: Blob, name: string): void {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the browser has started reading it by then
}

/** Assembles files from their parts, which may arrive in any order, and saves them. */
export class Files {
  private readonly parts = new Map<string, Map<number, DataView>>();

  constructor(private readonly done: (blob: Blob, name: string) => void = save) {}

  take(part: FilePart, buffers: readonly DataView[]): void {
    const known = valueAt(this.parts, part.id, () => new Map<number, DataView>());
    known.set(part.part, buffers[0] ?? new DataView(new ArrayBuffer(0)));
    if (known.size < part.parts) return;
    this.parts.delete(part.id);
    const inOrder = [...known].sort(([a], [b]) => a - b).map(([, view]) => view as BlobPart);
    this.done(new Blob(inOrder, { type: part.mime }), part.name);
  }
}
