/** Choices of the user, saved in this browser for all gangs. */
const FOLDED = "hydrogen-magic.folded";
const PINNED = "hydrogen-magic.pinned";

function read(key: string): Record<string, boolean> {
  try {
    const found = Object.entries<boolean>(JSON.parse(localStorage.getItem(key) ?? "{}"));
    return Object.fromEntries(found.filter(([, chosen]) => typeof chosen === "boolean"));
  } catch {
    return {}; // storage is forbidden in sandboxed frames, and other code may write to it
  }
}

function write(key: string, name: string, chosen: boolean): void {
  try {
    localStorage.setItem(key, JSON.stringify({ ...read(key), [name]: chosen }));
  } catch {
    // the choice applies to this view only
  }
}

/** Whether the user folded a part; null without a choice. */
export const foldedBefore = (part: string): boolean | null => read(FOLDED)[part] ?? null;

export const rememberFolded = (part: string, isFolded: boolean): void =>
  write(FOLDED, part, isFolded);

/** Metrics that the user pinned. */
export const pinnedBefore = (): ReadonlySet<string> =>
  new Set(Object.entries(read(PINNED)).flatMap(([name, isPinned]) => (isPinned ? [name] : [])));

export const rememberPinned = (name: string, isPinned: boolean): void =>
  write(PINNED, name, isPinned);
