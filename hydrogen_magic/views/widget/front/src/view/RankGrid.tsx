import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { MARKS, type Rank } from "../protocol";
import type { RankSummaryView } from "../store";
import type { Theme } from "../theme";
import { draw, type Grid, gridFor, rankAt } from "./cells";
import type { Ask } from "./props";
import { useWidth } from "./useWidth";

interface Props {
  summary: RankSummaryView;
  /** Number of ranks with a row. */
  rows: readonly Rank[];
  theme: Theme;
  ask: Ask;
  version: number;
}

/** Every rank as a small cell; a click or Enter shows its row. */
export function RankGrid({ summary, rows, theme, ask, version }: Props) {
  const [widthPx, measured] = useWidth();
  const [cursor, setCursor] = useState<number | null>(null);
  const choose = (rank: number) => {
    const { chosen } = summary;
    // the next click must know of it before the kernel's next summary has arrived
    summary.chosen = chosen.includes(rank) ? chosen.filter((r) => r !== rank) : [...chosen, rank];
    void ask({ do: "rows", ranks: summary.chosen });
  };
  const grid = gridFor(summary.phase.length, widthPx);
  return (
    <div class="hm-rank-grid" ref={measured}>
      <Cells {...{ summary, theme, version, grid, cursor, setCursor, choose }} />
      <div class="hm-rank-grid-foot">
        <Legend summary={summary} />
        <span class="hm-rank-grid-told" aria-live="polite">
          {cursor === null ? "" : describe(summary, rows, cursor)}
        </span>
      </div>
    </div>
  );
}

interface CellsProps extends Pick<Props, "summary" | "theme" | "version"> {
  grid: Grid;
  /** The rank under the pointer, or the one selected by keys. */
  cursor: number | null;
  setCursor: (rank: number | null) => void;
  choose: (rank: number) => void;
}

function Cells({ summary, theme, version, grid, cursor, setCursor, choose }: CellsProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    if (canvas.current) draw(canvas.current, grid, summary, theme, cursor);
  }, [version, theme, cursor, grid.columns, grid.pitch]);
  const np = summary.phase.length;
  const under = (event: MouseEvent) => rankAt(grid, np, event.offsetX, event.offsetY);
  const pick = (event: MouseEvent) => {
    const rank = under(event);
    if (rank !== null) choose(rank);
  };
  const keys = (event: KeyboardEvent) => {
    const to = moved(event.key, cursor ?? 0, grid, np);
    if (to !== null) setCursor(to);
    else if ((event.key === "Enter" || event.key === " ") && cursor !== null) choose(cursor);
    else return;
    event.preventDefault();
  };
  return (
    // biome-ignore lint/a11y/noInteractiveElementToNoninteractiveRole: it takes keys itself
    <canvas
      ref={canvas}
      tabIndex={0}
      role="application"
      aria-roledescription="grid of ranks"
      aria-label={`${np} ranks: arrow keys move, Enter shows or hides a rank's row`}
      onMouseMove={(event) => setCursor(under(event))}
      onMouseLeave={() => setCursor(null)}
      onClick={pick}
      onKeyDown={keys}
      onFocus={() => setCursor(cursor ?? 0)}
      onBlur={() => setCursor(null)}
    />
  );
}

function describe(summary: RankSummaryView, rows: readonly Rank[], rank: number): string {
  const phase = summary.phases[summary.phase[rank] ?? -1] ?? "";
  const percent = summary.progress[rank] ?? 255;
  const mark = MARKS[summary.mark[rank] ?? 0] ?? "";
  const progress = percent === 255 ? "" : `${percent} %`;
  const why = rows.find((row) => row.rank === rank)?.why ?? "";
  const words = [`rank ${rank}`, phase, progress, mark, why === phase ? "" : why];
  return words.filter(Boolean).join(" · ");
}

function moved(key: string, from: number, grid: Grid, np: number): number | null {
  const steps: Record<string, number> = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowUp: -grid.columns,
    ArrowDown: grid.columns,
    Home: -np,
    End: np,
  };
  const step = steps[key];
  return step === undefined ? null : Math.min(np - 1, Math.max(0, from + step));
}

function Legend({ summary }: { summary: RankSummaryView }) {
  const n_marked = (k: number) => summary.mark.reduce((n, mark) => n + (mark === k ? 1 : 0), 0);
  const marks = MARKS.map((mark, k) => [mark, k === 0 ? 0 : n_marked(k)] as const);
  return (
    <span class="hm-legend">
      <span class="hm-ramp" aria-hidden="true" />
      progress
      {marks.map(([mark, n]) =>
        n > 0 ? (
          <span key={mark} class="hm-legend-mark" data-mark={mark}>
            <i aria-hidden="true" />
            {n} {mark}
          </span>
        ) : null,
      )}
      {summary.shown.length > 0 && (
        <span class="hm-legend-mark" data-mark="shown">
          <i aria-hidden="true" />
          {summary.shown.length} in the table
        </span>
      )}
    </span>
  );
}
