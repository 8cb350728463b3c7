/** What a reader chose, remembered in this browser for all gangs. */
const KEY = "hydrogen-magic.folded";

function folded(): Set<string> {
  try {
    const names: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return new Set(Array.isArray(names) ? names.filter((name) => typeof name === "string") : []);
  } catch {
    return new Set(); // storage is forbidden in sandboxed frames, and its text is anybody's
  }
}

export function isFolded(section: string): boolean {
  return folded().has(section);
}

export function rememberFolded(section: string, isFolded: boolean): void {
  const names = folded();
  if (isFolded) names.add(section);
  else names.delete(section);
  try {
    localStorage.setItem(KEY, JSON.stringify([...names]));
  } catch {
    // the choice holds for this view only
  }
}
