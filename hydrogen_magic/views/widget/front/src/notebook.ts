/** What the notebook's document, which is saved, holds of a gang: `text` without a place for the view. */
export type Held = "nothing" | "text" | "place" | "picture";

interface Output {
  data?: Record<string, unknown>;
}

interface List<T> {
  length: number;
  get(index: number): T;
}

/** The parts of JupyterLab's widget manager that are used here; other front ends have none of them. */
export interface Manager {
  context?: { isDisposed?: boolean; model?: { cells?: List<{ outputs?: List<Output> }> } };
  kernel?: { clientId?: string } | null;
}

/** The class that the finished picture has, and the text before it has not. */
export const FINISHED = "hydrogen-magic";
const PICTURE = `<div class="${FINISHED}`;

/** Looks for the output of a gang; null where the document cannot be read. */
export function heldBy(manager: Manager | undefined, place: string, gangId: string): Held | null {
  const cells = manager?.context?.model?.cells;
  if (cells === undefined) return null;
  const outputs = items(cells).flatMap((cell) => (cell.outputs ? items(cell.outputs) : []));
  const placed = texts(outputs, "text/html").filter((html) => html.includes(place));
  if (placed.length > 0) {
    return placed.every((html) => html.includes(PICTURE)) ? "picture" : "place";
  }
  const isText = texts(outputs, "text/plain").some((text) => text.startsWith(`gang ${gangId} `));
  return isText ? "text" : "nothing";
}

/** Whether the notebook is no longer open in this page. */
export const isClosed = (manager: Manager | undefined): boolean =>
  manager?.context?.isDisposed === true;

/** Whether the page that shows the notebook is the one that `session` sent the cell from. */
export function isFrom(manager: Manager | undefined, session: string): boolean {
  return session !== "" && manager?.kernel?.clientId === session;
}

const texts = (outputs: readonly Output[], mime: string): string[] =>
  outputs.map(({ data }) => String(data?.[mime] ?? ""));

const items = <T>(list: List<T>): T[] => Array.from({ length: list.length }, (_, k) => list.get(k));
