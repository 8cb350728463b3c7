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

/**
 * Number of checks without a new part after which one is lost. They take 15 seconds: over a slow
 * connection, a part takes several.
 */
export const PART_PATIENCE = 30;

interface Incoming {
  parts: Map<number, DataView>;
  /** Checks to let pass until the file is lost. */
  n_toWait: number;
}

/**
 * Assembles files from their parts, which may arrive in any order, and saves them. The kernel sends
 * each part once, and a server may drop it.
 */
export class Files {
  private readonly incoming = new Map<string, Incoming>();
  /** Ids of files that were saved or lost: later messages about them mean nothing. */
  private readonly ended = new Set<string>();

  constructor(private readonly done: (blob: Blob, name: string) => void = save) {}

  /** The kernel has made a file; some of its parts may have arrived before this was known. */
  expect(id: string): void {
    if (!this.ended.has(id)) this.incomingAt(id);
  }

  take(part: FilePart, buffers: readonly DataView[]): void {
    if (this.ended.has(part.id)) return;
    const file = this.incomingAt(part.id);
    file.parts.set(part.part, buffers[0] ?? new DataView(new ArrayBuffer(0)));
    // The kernel sends one file after another: the others wait behind this part.
    for (const each of this.incoming.values()) each.n_toWait = PART_PATIENCE;
    if (file.parts.size < part.parts) return;
    this.drop(part.id);
    const inOrder = [...file.parts].sort(([a], [b]) => a - b).map(([, view]) => view as BlobPart);
    this.done(new Blob(inOrder, { type: part.mime }), part.name);
  }

  /** Drops files whose parts have stopped arriving; returns whether there were any. */
  dropLost(): boolean {
    for (const file of this.incoming.values()) file.n_toWait -= 1;
    const lost = [...this.incoming].filter(([, file]) => file.n_toWait <= 0);
    for (const [id] of lost) this.drop(id);
    return lost.length > 0;
  }

  private incomingAt(id: string): Incoming {
    return valueAt(this.incoming, id, () => ({ parts: new Map(), n_toWait: PART_PATIENCE }));
  }

  private drop(id: string): void {
    this.incoming.delete(id);
    this.ended.add(id);
  }
}
