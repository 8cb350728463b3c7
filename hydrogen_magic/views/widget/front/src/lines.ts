import { parseAnsi, plainOf, type Run } from "./ansi";
import type { Line } from "./protocol";

/** A line split into its runs, and its text without colours; each line is split once. */
export interface Cut {
  runs: readonly Run[];
  plain: string;
}

const cuts = new WeakMap<Line, Cut>();

export function cutOf(line: Line): Cut {
  const known = cuts.get(line);
  if (known) return known;
  const runs = parseAnsi(line[2]);
  const cut = { runs, plain: plainOf(runs) };
  cuts.set(line, cut);
  return cut;
}

/** A search hit: its line (counted from the first one received), and its position in it. */
export interface Hit {
  line: number;
  from: number;
  until: number;
}

/** More hits than a user steps through; the search stays fast for `e`. */
export const MOST_HITS = 10_000;

/** Finds a text in lines, ignoring case; `rank` null means all ranks. */
export function search(
  lines: readonly Line[],
  n_before: number,
  rank: number | null,
  wanted: string,
): Hit[] {
  const hits: Hit[] = [];
  const needle = wanted.toLowerCase();
  if (needle === "") return hits;
  for (let i = 0; i < lines.length && hits.length < MOST_HITS; i++) {
    const line = lines[i];
    if (line === undefined || (rank !== null && line[0] !== rank)) continue;
    addHits(hits, cutOf(line).plain.toLowerCase(), n_before + i, needle);
  }
  return hits;
}

function addHits(hits: Hit[], text: string, line: number, needle: string): void {
  let from = text.indexOf(needle);
  while (from >= 0 && hits.length < MOST_HITS) {
    hits.push({ line, from, until: from + needle.length });
    from = text.indexOf(needle, from + needle.length);
  }
}
