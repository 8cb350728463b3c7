import { num } from "../columns";
import { valueAt } from "../maps";
import type { Theme } from "../theme";
import { SLOTS } from "./bins";
import { inkOn, type NameColors, phaseFill } from "./colors";
import { fitted, pxPerS, type Scale, ticks, toX } from "./geometry";
import { AXIS_PX, type Layout, type Strip } from "./layout";
import { type Columns, columnsFor } from "./shares";
import { PHASES, type SpanStore } from "./store";

/** Rows whose average span is narrower are drawn as shares. */
export const NEAR_PX = 4;
/** Wider boxes leave a gap of a hair to their neighbour. */
const SPLIT_PX = 5;
const FONT_PX = 11;
const DIMMED = 0.15;
/** Phases form the background of spans. */
const PHASE_ALPHA = 0.4;

export interface Scene {
  store: SpanStore;
  layout: Layout;
  scale: Scale;
  theme: Theme;
  colors: NameColors;
  /** The highlighted name; null: all names are. */
  highlight: string | null;
  /** The current phase of a rank, which has no span yet; empty if unknown. */
  phaseOf: (rank: number) => string;
  /** The current end of the run. */
  endS: number;
  pixelRatio: number;
}

/** Draws all lanes and the axis. */
export function draw(ctx: CanvasRenderingContext2D, scene: Scene): void {
  const { layout, scale, pixelRatio } = scene;
  ctx.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  ctx.clearRect(0, 0, scale.leftPx + scale.widthPx, layout.heightPx);
  ctx.font = `${FONT_PX}px ${scene.theme.font}`;
  ctx.textBaseline = "middle";
  drawLabels(ctx, scene);
  drawAxis(ctx, scene);
  ctx.save();
  ctx.beginPath();
  ctx.rect(scale.leftPx, AXIS_PX, scale.widthPx, layout.heightPx);
  ctx.clip();
  for (const strip of layout.strips) drawStrip(ctx, scene, strip);
  ctx.restore();
}

function drawLabels(ctx: CanvasRenderingContext2D, { layout, theme }: Scene): void {
  ctx.textAlign = "left";
  for (const { text, y, isRank } of layout.labels) {
    ctx.fillStyle = isRank ? theme.text : theme.faint;
    ctx.fillText(text, isRank ? 0 : 8, y);
  }
}

function drawAxis(ctx: CanvasRenderingContext2D, { layout, scale, theme }: Scene): void {
  for (const { timeS, label } of ticks(scale)) {
    const x = Math.round(toX(scale, timeS)) + 0.5;
    ctx.fillStyle = theme.line;
    ctx.fillRect(x - 0.5, AXIS_PX - 5, 1, layout.heightPx - AXIS_PX + 3);
    ctx.fillStyle = theme.faint;
    const half = ctx.measureText(label).width / 2;
    const right = scale.leftPx + scale.widthPx;
    ctx.fillText(label, Math.min(Math.max(x - half, scale.leftPx), right - 2 * half), 8);
  }
}

function drawStrip(ctx: CanvasRenderingContext2D, scene: Scene, strip: Strip): void {
  const { scale, theme } = scene;
  if (strip.track !== PHASES) {
    ctx.fillStyle = theme.shade;
    ctx.fillRect(scale.leftPx, strip.y, scale.widthPx, strip.height);
  }
  const columns = strip.track === PHASES ? null : columnsOf(strip, scale);
  if (columns === null) drawBoxes(ctx, scene, strip);
  else drawStacks(ctx, scene, strip, columns);
  if (strip.track === PHASES && strip.depth === 0) drawOpenPhase(ctx, scene, strip);
}

/**
 * How a row is summarised if its spans are too narrow to be distinguished; null if they are not.
 */
export function columnsOf({ row }: Strip, { range, widthPx }: Scale): Columns | null {
  const [first, last] = row.between(range[0], range[1]);
  const from = Math.max(range[0], row.startS);
  const until = Math.min(range[1], row.endS);
  const inPx = ((until - from) / (range[1] - range[0])) * widthPx;
  if ((last - first) * NEAR_PX <= inPx || last - first < 8) return null;
  const n_perWidth = (last - first) * (widthPx / Math.max(1, inPx));
  return columnsFor(range, widthPx, n_perWidth);
}

// ── near: boxes with names ─────────────────────────────────────────────────────────────────────

function drawBoxes(ctx: CanvasRenderingContext2D, scene: Scene, strip: Strip): void {
  const { store, scale } = scene;
  const { row } = strip;
  const [first, last] = row.between(scale.range[0], scale.range[1]);
  let doneX = Number.NEGATIVE_INFINITY;
  for (let i = first; i < last; i++) {
    const x = toX(scale, num(row.starts, i));
    const end = toX(scale, row.endOf(i));
    if (end < scale.leftPx) continue;
    if (end - x < 1 && x < doneX) continue; // the pixel is occupied
    doneX = Math.max(x + 1, end);
    drawBox(ctx, scene, strip, store.nameOf(num(row.names, i)), x, end);
  }
}

function drawBox(
  ctx: CanvasRenderingContext2D,
  scene: Scene,
  strip: Strip,
  name: string,
  x: number,
  end: number,
): void {
  const { scale, theme, colors } = scene;
  const isPhase = strip.track === PHASES;
  const fill = isPhase ? phaseFill(name, theme) : colors.fill(name, theme);
  const left = Math.max(x, scale.leftPx - 2);
  const right = Math.min(end, scale.leftPx + scale.widthPx + 2);
  const width = Math.max(1, right - left - (end - x > SPLIT_PX ? 1 : 0));
  const alpha = isLit(scene, name) || isPhase ? 1 : DIMMED;
  ctx.globalAlpha = isPhase ? PHASE_ALPHA : alpha;
  ctx.fillStyle = fill;
  ctx.fillRect(left, strip.y, width, strip.height);
  ctx.globalAlpha = alpha;
  const ink = isPhase ? theme.text : inkOn(fill);
  if (strip.height >= 12 && width > 22) drawName(ctx, strip, name, ink, left, width);
  ctx.globalAlpha = 1;
}

const isLit = ({ highlight }: Scene, name: string) => highlight === null || highlight === name;

function drawName(
  ctx: CanvasRenderingContext2D,
  { y, height }: Strip,
  name: string,
  ink: string,
  left: number,
  width: number,
): void {
  const text = fitted(name, width - 8, (t) => widthOf(ctx, t));
  if (text === "") return;
  ctx.fillStyle = ink;
  ctx.fillText(text, left + 4, y + height / 2 + 0.5);
}

const widths = new Map<string, number>();

/** `measureText` costs more than the box itself, and names are repeated. */
function widthOf(ctx: CanvasRenderingContext2D, text: string): number {
  if (widths.size > 4000) widths.clear();
  return valueAt(widths, ctx.font + text, () => ctx.measureText(text).width);
}

/** The current phase has no span: it began where the last one ended. */
function drawOpenPhase(ctx: CanvasRenderingContext2D, scene: Scene, strip: Strip): void {
  const phase = scene.phaseOf(strip.rank);
  if (phase === "" || strip.row.endS >= scene.endS) return;
  drawBox(ctx, scene, strip, phase, toX(scene.scale, strip.row.endS), toX(scene.scale, scene.endS));
}

// ── far: shares of time, stacked ───────────────────────────────────────────────────────────────

let sums = new Float64Array(0);
let floors = new Float64Array(0);
let edges = new Float64Array(0);

function drawStacks(
  ctx: CanvasRenderingContext2D,
  scene: Scene,
  strip: Strip,
  columns: Columns,
): void {
  prepare(scene, columns);
  strip.row.addTo(sums, columns.fromS, columns.columnS, columns.n);
  for (let k = 0; k < columns.n; k++) normalize(k * SLOTS, columns.columnS);
  for (const slot of slotsInOrder(scene)) {
    const name = scene.store.nameOfSlot(slot);
    ctx.globalAlpha = isLit(scene, name) ? 1 : DIMMED;
    ctx.fillStyle = scene.colors.fill(name, scene.theme);
    fillBand(ctx, strip, slot, columns.n);
  }
  ctx.globalAlpha = 1;
}

/** Clears the sums of a strip's columns, and computes their edges on device pixels. */
function prepare({ scale, pixelRatio }: Scene, { fromS, columnS, n }: Columns): void {
  if (sums.length < n * SLOTS) {
    sums = new Float64Array(2 * n * SLOTS);
    floors = new Float64Array(2 * n);
    edges = new Float64Array(2 * n + 1);
  }
  sums.fill(0, 0, n * SLOTS);
  floors.fill(0, 0, n);
  const columnPx = columnS * pxPerS(scale);
  const first = toX(scale, fromS);
  for (let k = 0; k <= n; k++) {
    edges[k] = Math.round((first + k * columnPx) * pixelRatio) / pixelRatio;
  }
}

/** Converts seconds to shares; overlapping threads have more seconds than the column. */
function normalize(at: number, columnS: number): void {
  let whole = 0;
  for (let slot = at; slot < at + SLOTS; slot++) whole += num(sums, slot);
  const by = Math.max(columnS, whole);
  for (let slot = at; slot < at + SLOTS; slot++) sums[slot] = num(sums, slot) / by;
}

/** One name's share of every column, on top of the names before it. */
function fillBand(ctx: CanvasRenderingContext2D, strip: Strip, slot: number, n: number): void {
  const bottom = strip.y + strip.height;
  const share = (k: number) => num(sums, k * SLOTS + slot);
  let first = 0;
  while (first < n && share(first) === 0) first++;
  if (first === n) return;
  ctx.beginPath();
  for (let k = first; k < n; k++) {
    const y = bottom - (num(floors, k) + share(k)) * strip.height;
    ctx.lineTo(num(edges, k), y);
    ctx.lineTo(num(edges, k + 1), y);
  }
  for (let k = n - 1; k >= first; k--) {
    const y = bottom - num(floors, k) * strip.height;
    ctx.lineTo(num(edges, k + 1), y);
    ctx.lineTo(num(edges, k), y);
    floors[k] = num(floors, k) + share(k);
  }
  ctx.fill();
}

/** Known names first and in a fixed order, so that a band is continuous across the picture. */
function slotsInOrder({ store, colors }: Scene): number[] {
  const slots = Array.from({ length: SLOTS }, (_, slot) => slot);
  const place = slots.map((slot) => {
    const name = store.nameOfSlot(slot);
    return name === "other" ? Number.POSITIVE_INFINITY : colors.indexOf(name);
  });
  return slots.sort((a, b) => num(place, a) - num(place, b) || a - b);
}
