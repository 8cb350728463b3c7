import { useEffect, useRef } from "preact/hooks";
import { parseAnsi } from "../ansi";
import { CopyButton } from "./Failure";
import { Section } from "./Section";
import { Text } from "./Text";

/** Ranks with identical stacks, grouped. */
export interface Group {
  ranks: number[];
  text: string;
}

/** The smallest group first: a rank in a different place is the one that the others wait for. */
export function grouped(stacks: Record<string, string>): Group[] {
  const groups = new Map<string, number[]>();
  for (const [rank, text] of Object.entries(stacks)) {
    groups.set(text, [...(groups.get(text) ?? []), Number(rank)]);
  }
  const list = [...groups].map(([text, ranks]) => ({ text, ranks: ranks.sort((a, b) => a - b) }));
  return list.sort((a, b) => a.ranks.length - b.ranks.length || first(a) - first(b));
}

const first = (group: Group) => group.ranks[0] ?? 0;

/** `rank 3`, `ranks 0, 2`, `ranks 4–127`. */
export function ranksText(ranks: readonly number[]): string {
  const runs: [number, number][] = [];
  for (const rank of ranks) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const parts = runs.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  return `${ranks.length === 1 ? "rank" : "ranks"} ${parts.join(", ")}`;
}

/** The stacks of all threads at the time of the request. */
export function Stacks({ stacks }: { stacks: Record<string, string> }) {
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [stacks]);
  const groups = grouped(stacks);
  return (
    <Section name="stacks" title="Stacks" tools={<CopyButton text={allText(groups)} />}>
      {groups.map((group) => (
        <details key={group.ranks.join()} open={groups.length <= 4}>
          <summary>{ranksText(group.ranks)}</summary>
          <pre>
            <Text runs={parseAnsi(group.text)} />
          </pre>
        </details>
      ))}
      <div ref={end} />
    </Section>
  );
}

const allText = (groups: readonly Group[]) =>
  groups.map(({ ranks, text }) => `${ranksText(ranks)}\n${text}`).join("\n\n");
