import { useEffect, useRef } from "preact/hooks";
import { parseAnsi } from "../ansi";
import { counted } from "../format";
import type { Stacks as RankStacks } from "../protocol";
import type { Store } from "../store";
import { CopyButton } from "./Failure";
import { Section } from "./Section";
import { Text } from "./Text";

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

/** The stacks of all threads at the time of the request; new ones are scrolled to, once. */
export function Stacks({ store, stacks }: { store: Store; stacks: RankStacks }) {
  const { groups, n_left_out } = stacks;
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (store.areStacksNew) end.current?.scrollIntoView({ block: "nearest" });
    store.areStacksNew = false;
  }, [store, stacks]);
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
      {n_left_out > 0 && (
        <p class="hm-note">{`${counted(n_left_out, "other rank")} with yet other stacks`}</p>
      )}
      <div ref={end} />
    </Section>
  );
}

const allText = (groups: RankStacks["groups"]) =>
  groups.map(({ ranks, text }) => `${ranksText(ranks)}\n${text}`).join("\n\n");
