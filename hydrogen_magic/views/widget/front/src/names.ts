/**
 * Names cut to `most` characters so that different ones stay different; the same rule as in
 * `short_names.py`.
 */
export function shortNames(names: readonly string[], most: number): string[] {
  const isLong = (name: string) => name.length > most;
  const long = names.filter(isLong);
  const half = Math.floor((most - 1) / 2);
  const differing = commonStart(long);
  const cuts: ((name: string) => string)[] = [
    (name) => `…${name.slice(1 - most)}`,
    (name) => `${name.slice(0, most - 1)}…`,
    (name) => `${name.slice(0, most - 1 - half)}…${name.slice(-half)}`,
    (name) => `…${name.slice(differing, differing + most - 2)}…`,
  ];
  const n_different = new Set(names).size;
  for (const cut of cuts) {
    const made = names.map((name) => (isLong(name) ? cut(name) : name));
    if (new Set(made).size === n_different) return made;
  }
  return names.map((name, k) => (isLong(name) ? `${k + 1} ${name.slice(0, most - 3)}…` : name));
}

/** Length of the common prefix of all names. */
function commonStart([first = "", ...others]: readonly string[]): number {
  let n = 0;
  while (n < first.length && others.every((name) => name[n] === first[n])) n++;
  return n;
}
