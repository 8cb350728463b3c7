import { MARKS } from "../protocol";
import type { RankSummaryView } from "../store";
import type { Theme } from "../theme";

/** The layout of cells: `pitch` is a cell and the gap after it, in CSS pixels. */
export interface Grid {
  columns: number;
  rows: number;
  pitch: number;
}

const PITCHES = [18, 16, 14, 12, 10, 8, 7, 6] as const;
const MOST_HEIGHT = 168;
const UNKNOWN = 255;
/** Before the page is laid out: a strip of about the right height. */
const LIKELY_WIDTH = 800;

/** The largest cells with which all ranks fit into a strip that leaves space for the rest. */
export function gridFor(np: number, width: number): Grid {
  const grids = PITCHES.map((pitch) => {
    const columns = Math.max(1, Math.min(np, Math.floor((width || LIKELY_WIDTH) / pitch)));
    return { columns, rows: Math.ceil(np / columns), pitch };
  });
  const fitting = grids.find((grid) => grid.rows * grid.pitch <= MOST_HEIGHT);
  return fitting ?? grids.at(-1) ?? { columns: 1, rows: np, pitch: PITCHES[0] };
}

export function rankAt(grid: Grid, np: number, x: number, y: number): number | null {
  const column = Math.floor(x / grid.pitch);
  if (column < 0 || column >= grid.columns || y < 0) return null;
  const rank = Math.floor(y / grid.pitch) * grid.columns + column;
  return rank < np ? rank : null;
}

export function draw(
  canvas: HTMLCanvasElement,
  grid: Grid,
  summary: RankSummaryView,
  theme: Theme,
  cursor: number | null,
): void {
  const context = fitted(canvas, grid.columns * grid.pitch, grid.rows * grid.pitch);
  if (context === null) return;
  const shown = new Set(summary.shown);
  for (let rank = 0; rank < summary.phase.length; rank++) {
    const x = (rank % grid.columns) * grid.pitch;
    const y = Math.floor(rank / grid.columns) * grid.pitch;
    cell(context, x, y, grid.pitch - 2, summary, rank, theme);
    if (rank === cursor) outline(context, x, y, grid.pitch - 2, theme.text, 2);
    else if (shown.has(rank)) outline(context, x, y, grid.pitch - 2, theme.faint, 1);
  }
  context.globalAlpha = 1;
}

/** Gives the canvas as many device pixels as it covers, and clears it. */
function fitted(canvas: HTMLCanvasElement, width: number, height: number) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  context?.clearRect(0, 0, width, height);
  return context;
}

function cell(
  context: CanvasRenderingContext2D,
  x: number,
  y: number,
  side: number,
  summary: RankSummaryView,
  rank: number,
  theme: Theme,
): void {
  const phase = summary.phases[summary.phase[rank] ?? -1] ?? "";
  const mark = MARKS[summary.mark[rank] ?? 0] ?? "";
  const progress = summary.progress[rank] ?? UNKNOWN;
  context.globalAlpha = 1;
  context.fillStyle = theme.shade;
  context.fillRect(x + 1, y + 1, side, side);
  context.fillStyle = colorOfPhase(phase, theme);
  context.globalAlpha = alphaOf(phase, progress);
  context.fillRect(x + 1, y + 1, side, side);
  context.globalAlpha = 1;
  if (mark === "straggler") corner(context, x + 1, y + 1, side, theme.warning);
  if (mark === "stopped") inset(context, x + 1, y + 1, side, theme.warning);
  if (mark === "dead" || phase === "failed") cross(context, x + 1, y + 1, side, theme.error);
}

function colorOfPhase(phase: string, theme: Theme): string {
  if (phase === "done") return theme.good;
  if (phase === "failed") return theme.error;
  return phase === "stopped" || phase === "idle" ? theme.faint : theme.accent;
}

function alphaOf(phase: string, progress: number): number {
  if (phase === "done") return 0.75;
  if (phase === "failed" || phase === "stopped" || phase === "idle") return 0.25;
  if (phase === "waiting" || phase === "starting" || phase === "loading") return 0;
  return progress === UNKNOWN ? 0.3 : 0.12 + (0.88 * progress) / 100;
}

function outline(
  context: CanvasRenderingContext2D,
  x: number,
  y: number,
  side: number,
  color: string,
  width: number,
): void {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(x + 0.5, y + 0.5, side + 1, side + 1);
}

/** The mark of a straggler: a triangle over the lower right half. */
function corner(context: CanvasRenderingContext2D, x: number, y: number, side: number, c: string) {
  context.fillStyle = c;
  context.beginPath();
  context.moveTo(x + side, y);
  context.lineTo(x + side, y + side);
  context.lineTo(x, y + side);
  context.fill();
}

function inset(context: CanvasRenderingContext2D, x: number, y: number, side: number, c: string) {
  context.fillStyle = c;
  context.fillRect(x + side * 0.25, y + side * 0.25, side * 0.5, side * 0.5);
}

function cross(context: CanvasRenderingContext2D, x: number, y: number, side: number, c: string) {
  context.strokeStyle = c;
  context.lineWidth = Math.max(1.5, side / 6);
  context.beginPath();
  context.moveTo(x + 1, y + 1);
  context.lineTo(x + side - 1, y + side - 1);
  context.moveTo(x + side - 1, y + 1);
  context.lineTo(x + 1, y + side - 1);
  context.stroke();
}
