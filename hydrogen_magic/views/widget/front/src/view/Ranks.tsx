import { count } from "../format";
import type { Rank } from "../protocol";
import type { Store } from "../store";
import type { SectionProps } from "./props";
import { RankGrid } from "./RankGrid";
import { RankTable } from "./RankTable";
import { Section } from "./Section";

/** One row per rank; for many ranks, a grid of all and rows of the important ones. */
export function Ranks({ store, theme, ask, version }: SectionProps & { store: Store }) {
  const { summary } = store;
  const rows = summary ? shownRows(store.ranks, summary.shown) : allRows(store.ranks);
  if (!summary && rows.length === 0) return null;
  const counts = summary?.counts ?? countPhases(rows);
  return (
    <Section name="ranks" title="Ranks" note={<Counts counts={counts} />}>
      {summary && <RankGrid {...{ summary, rows, theme, ask, version }} />}
      <RankTable rows={rows} />
    </Section>
  );
}

const allRows = (ranks: ReadonlyMap<number, Rank>) =>
  [...ranks.values()].sort((a, b) => a.rank - b.rank);

const shownRows = (ranks: ReadonlyMap<number, Rank>, shown: readonly number[]) =>
  shown.map((rank) => ranks.get(rank)).filter((row) => row !== undefined);

function countPhases(rows: readonly Rank[]): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const { phase } of rows) counts[phase] = (counts[phase] ?? 0) + 1;
  return counts;
}

function Counts({ counts }: { counts: Record<string, number> }) {
  const some = Object.entries(counts).filter(([, n]) => n > 0);
  some.sort(([a], [b]) => Number(b === "failed") - Number(a === "failed"));
  return <>{some.map(([phase, n]) => `${count(n)} ${phase}`).join(" · ")}</>;
}
