import type { JSX } from "preact";
import { plainOf, type Run, type Style } from "../ansi";

/** A search hit: its first and last character, and whether it is the current one. */
export interface Mark {
  from: number;
  until: number;
  isCurrent: boolean;
}

/** A rank's text with its colours. It is inserted as text nodes, whatever it contains. */
export function Text({ runs, marks = [] }: { runs: readonly Run[]; marks?: readonly Mark[] }) {
  const pieces = marks.length ? cutAtMarks(runs, marks) : runs.map((run) => ({ run, mark: null }));
  return (
    <>
      {pieces.map(({ run, mark }, i) => (
        <Piece key={i} run={run} mark={mark} />
      ))}
    </>
  );
}

interface PieceOfRun {
  run: Run;
  mark: Mark | null;
}

function Piece({ run, mark }: PieceOfRun) {
  const { classes, style } = look(run.style);
  const text = classes ? (
    <span class={classes} style={style}>
      {run.text}
    </span>
  ) : (
    run.text
  );
  return mark ? <mark class={mark.isCurrent ? "hm-current" : ""}>{text}</mark> : text;
}

/** Splits runs where marks begin and end; marks are in order and do not overlap. */
export function cutAtMarks(runs: readonly Run[], marks: readonly Mark[]): PieceOfRun[] {
  const length = plainOf(runs).length;
  const edges = [...marks.flatMap(({ from, until }) => [from, until]), length];
  const pieces: PieceOfRun[] = [];
  let at = 0;
  for (const run of runs) {
    const end = at + run.text.length;
    let from = at;
    for (const edge of [...edges.filter((e) => e > at && e < end), end]) {
      const mark = marks.find((m) => m.from <= from && from < m.until) ?? null;
      pieces.push({ run: { ...run, text: run.text.slice(from - at, edge - at) }, mark });
      from = edge;
    }
    at = end;
  }
  return pieces;
}

function look({ fg, bg, inverse, ...flags }: Style): { classes: string; style: JSX.CSSProperties } {
  const classes = Object.keys(flags).map((flag) => `hm-sgr-${flag}`);
  const style: JSX.CSSProperties = {};
  if (fg !== undefined) style["--hm-fg" as "color"] = css(fg);
  if (bg !== undefined) style["--hm-bg" as "color"] = css(bg);
  if (inverse) classes.push("hm-sgr-inverse");
  else {
    if (fg !== undefined) classes.push("hm-sgr-fg");
    if (bg !== undefined) classes.push("hm-sgr-bg");
  }
  return { classes: classes.join(" "), style };
}

/** Numbers are the theme's colours; others are as written by `ansi.ts`. */
const css = (color: number | string) =>
  typeof color === "number" ? `var(--hm-ansi-${color})` : color;
