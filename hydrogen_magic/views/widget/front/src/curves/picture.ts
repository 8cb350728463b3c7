import { figure } from "../numbers";
import { colorOf, dashOf, type Theme } from "../theme";
import type { Drawn } from "./Chart";
import type { Metric } from "./store";
import { type RankValue, type Rows, readLast } from "./values";

const CAPTION_PX = 22;
const LEGEND_PX = 20;
const GAP_PX = 16;

/**
 * All charts on one canvas as displayed, with captions and last values; null if it is larger than
 * the browser's canvases.
 */
export function picture(
  metrics: readonly Metric[],
  rows: Rows,
  charts: ReadonlyMap<string, Drawn>,
  n_columns: number,
  theme: Theme,
): Promise<Blob | null> {
  const cells = metrics.flatMap((metric) => {
    const canvas = charts.get(metric.name)?.();
    return canvas ? [{ metric, canvas }] : [];
  });
  const [first] = cells;
  if (first === undefined) return Promise.resolve(null);
  const ratio = devicePixelRatio;
  const cell = {
    width: first.canvas.width / ratio + GAP_PX,
    height: first.canvas.height / ratio + CAPTION_PX + LEGEND_PX + GAP_PX,
  };
  const sheet = document.createElement("canvas");
  sheet.width = (cell.width * Math.min(n_columns, cells.length) + GAP_PX) * ratio;
  sheet.height = (cell.height * Math.ceil(cells.length / n_columns) + GAP_PX) * ratio;
  const ctx = sheet.getContext("2d") as CanvasRenderingContext2D;
  ctx.scale(ratio, ratio);
  ctx.fillStyle = theme.surface;
  ctx.fillRect(0, 0, sheet.width, sheet.height);
  cells.forEach(({ metric, canvas }, k) => {
    ctx.save();
    const row = Math.floor(k / n_columns);
    ctx.translate(GAP_PX + (k % n_columns) * cell.width, GAP_PX + row * cell.height);
    drawCell(ctx, metric, rows, canvas, theme);
    ctx.restore();
  });
  return new Promise((done) => sheet.toBlob(done, "image/png"));
}

function drawCell(
  ctx: CanvasRenderingContext2D,
  metric: Metric,
  rows: Rows,
  canvas: HTMLCanvasElement,
  theme: Theme,
): void {
  const [width, height] = [canvas.width / devicePixelRatio, canvas.height / devicePixelRatio];
  ctx.fillStyle = theme.text;
  ctx.textBaseline = "top";
  ctx.font = `600 12px ${theme.font}`;
  ctx.fillText(metric.name, 0, 0, width);
  ctx.drawImage(canvas, 0, CAPTION_PX, width, height);
  const ranks = readLast(metric, rows)?.ranks ?? [];
  drawLegend(ctx, ranks, theme, width, CAPTION_PX + height + 6);
}

function drawLegend(
  ctx: CanvasRenderingContext2D,
  ranks: readonly RankValue[],
  theme: Theme,
  widthPx: number,
  y: number,
): void {
  ctx.font = `11px ${theme.font}`;
  let x = 0;
  for (const { rank, value } of ranks) {
    const label = `rank ${rank}  ${figure(value)}`;
    const n_px = ctx.measureText(label).width + 38;
    if (x + n_px > widthPx) return;
    ctx.strokeStyle = colorOf(rank);
    ctx.setLineDash(dashOf(rank));
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.moveTo(x, y + 6);
    ctx.lineTo(x + 16, y + 6);
    ctx.stroke();
    ctx.fillStyle = theme.faint;
    ctx.fillText(label, x + 21, y);
    x += n_px;
  }
}
