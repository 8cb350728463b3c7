import { useMemo, useRef } from "preact/hooks";
import type { Mark, Rank } from "../protocol";
import {
  barTitle,
  type Column,
  columnsOf,
  fastest,
  hasBar,
  isBefore,
  rowsPerS,
  stateText,
  Widths,
} from "./figures";
import { Shape, type ShapeName, Swatch, type Tone, Track } from "./shapes";

export function RankTable({ rows }: { rows: readonly Rank[] }) {
  const widths = useRef(new Widths()).current;
  const columns = columnsOf(rows);
  const best = fastest(rows);
  const hasBars = rows.some(hasBar);
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reached by keyboard
    <section class="hm-scroll" tabIndex={0} aria-label="Table of ranks">
      <table class="hm-ranks-table">
        <Head {...columns} rows={rows} widths={widths} />
        <tbody>
          {rows.map((row, i) => (
            <Row key={row.rank} {...columns} {...{ row, i, best, hasBars }} />
          ))}
        </tbody>
      </table>
    </section>
  );
}

interface Columns {
  before: readonly Column[];
  after: readonly Column[];
}

const classOf = ({ look }: Column) => look.replace(/\w+/g, "hm-$&");

function Head({
  before,
  after,
  rows,
  widths,
}: Columns & { rows: readonly Rank[]; widths: Widths }) {
  const title = (one: Column) => (
    <th
      key={one.key}
      scope="col"
      class={classOf(one)}
      title={one.title}
      style={{ minWidth: widths.of(one.key, one.texts) }}
    >
      {one.short}
    </th>
  );
  return (
    <thead>
      <tr>
        <th scope="col">rank</th>
        {before.map(title)}
        {rows.some(hasBar) && (
          <th scope="col" class="hm-wide" title={barTitle(rows)}>
            {barTitle(rows)}
          </th>
        )}
        {after.map(title)}
        <th scope="col" class="hm-state" style={{ minWidth: widths.ofStates(rows) }}>
          state
        </th>
      </tr>
    </thead>
  );
}

interface RowProps extends Columns {
  row: Rank;
  i: number;
  /** See `fastest`. */
  best: number;
  hasBars: boolean;
}

function Row({ before, after, row, i, best, hasBars }: RowProps) {
  const cell = (one: Column) => (
    <td key={one.key} class={classOf(one)}>
      {one.texts[i]}
    </td>
  );
  const state = useMemo(() => <State row={row} />, [row]);
  return (
    <tr data-mark={row.mark} data-phase={row.phase}>
      <th scope="row">
        <Swatch rank={row.rank} />
        rank {row.rank}
      </th>
      {before.map(cell)}
      {hasBars && (
        <td class="hm-wide">
          <Progress row={row} best={best} />
        </td>
      )}
      {after.map(cell)}
      <td class="hm-state">{state}</td>
    </tr>
  );
}

// ── cells ───────────────────────────────────────────────────────────────────────────────────────

function Progress({ row, best }: { row: Rank; best: number }) {
  if (isBefore(row)) return <Track label={row.doing || row.phase} />;
  const perS = rowsPerS(row);
  // Ranks that receive rows on demand are never behind: they differ in speed, the number beside it.
  if (perS !== null) return best > 0 ? <Track share={perS / best} /> : null;
  if (!row.bar?.total) return null;
  const { n, total, desc } = row.bar;
  const done = Math.min(n, total);
  const label = `rank ${row.rank}${desc ? `, ${desc}` : ""}`;
  return <Track label={label} share={done / total} now={done} max={total} />;
}

const MARK_SHAPES: Record<Mark, [ShapeName, Tone] | null> = {
  "": null,
  straggler: ["slow", "warning"],
  stopped: ["square", "warning"],
  dead: ["cross", "error"],
  waiting: ["hourglass", "faint"],
};
const PHASE_SHAPES: Record<string, [ShapeName, Tone]> = {
  done: ["check", "good"],
  failed: ["cross", "error"],
  stopped: ["square", "faint"],
};

function State({ row }: { row: Rank }) {
  const [shape, tone] = MARK_SHAPES[row.mark] ?? PHASE_SHAPES[row.phase] ?? [null, "faint"];
  const text = stateText(row);
  return (
    <span class={shape ? `hm-marked hm-${tone}` : "hm-marked"} title={text}>
      {shape && <Shape name={shape} />}
      {text}
    </span>
  );
}
