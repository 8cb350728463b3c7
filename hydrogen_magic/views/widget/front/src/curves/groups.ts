import { valueAt } from "../maps";

/** Metrics shown together under one caption. */
export interface MetricGroup {
  /** Key for the saved state, and caption: "pinned", or the prefix of the names before "/". */
  title: string;
  names: string[];
  /** Whether it is folded by default. */
  isFoldedAtFirst: boolean;
}

export const PINNED = "pinned";
/** Group of metrics without a "/" beside those with one. */
export const OTHERS = "metrics";

/** The part of a name within its group. */
export const nameIn = (title: string, name: string): string =>
  name.startsWith(`${title}/`) ? name.slice(title.length + 1) : name;

const groupOf = (name: string): string => {
  const at = name.indexOf("/");
  return at > 0 ? name.slice(0, at) : OTHERS;
};

/**
 * Groups in the order of their first metrics, pinned ones first. Groups after `mostAtFirst` charts
 * are folded by default. `wanted` selects the metrics that contain it, with every group unfolded.
 */
export function grouped(
  names: readonly string[],
  pinned: ReadonlySet<string>,
  wanted: string,
  mostAtFirst: number,
): MetricGroup[] {
  const found = names.filter((name) => name.toLowerCase().includes(wanted.trim().toLowerCase()));
  const groups = new Map<string, string[]>();
  const add = (title: string, name: string) => valueAt(groups, title, () => []).push(name);
  for (const name of found) if (pinned.has(name)) add(PINNED, name);
  for (const name of found) if (!pinned.has(name)) add(groupOf(name), name);
  let n_before = 0;
  return [...groups].map(([title, members]) => {
    const isFoldedAtFirst = wanted.trim() === "" && n_before >= mostAtFirst;
    n_before += members.length;
    return { title, names: members, isFoldedAtFirst };
  });
}
