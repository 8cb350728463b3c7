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

/** The search ends with the line of this hit: a user steps through fewer, and it stays fast for `e`. */
export const MOST_HITS = 10_000;

/**
 * Finds a text in lines, ignoring case; `rank` null means all ranks. The hits are in order; if there
 * are too many, those of the oldest lines are missing.
 */
export function search(
  lines: readonly Line[],
  n_before: number,
  rank: number | null,
  wanted: string,
): Hit[] {
  const byLine: Hit[][] = [];
  const needle = lowered(wanted);
  if (needle === "") return [];
  let n_hits = 0;
  for (let i = lines.length - 1; i >= 0 && n_hits < MOST_HITS; i--) {
    const line = lines[i];
    if (line === undefined || (rank !== null && line[0] !== rank)) continue;
    const found = hitsIn(lowered(cutOf(line).plain), n_before + i, needle);
    n_hits += found.length;
    byLine.push(found);
  }
  return byLine.reverse().flat();
}

/** Lower case of the same length: only "İ" has one of two code units. */
const lowered = (text: string) => text.replaceAll("İ", "I").toLowerCase();

function hitsIn(text: string, line: number, needle: string): Hit[] {
  const hits: Hit[] = [];
  let from = text.indexOf(needle);
  while (from >= 0) {
    hits.push({ line, from, until: from + needle.length });
    from = text.indexOf(needle, from + needle.length);
  }
  return hits;
}
