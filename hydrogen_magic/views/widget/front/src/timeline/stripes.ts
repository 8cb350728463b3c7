import { stripeOn } from "./colors";

/** Pixels from stripe to stripe, along both axes. */
const STEP_PX = 6;

const made = new Map<string, CanvasPattern>();

/** A fill with diagonal stripes; only the fill if patterns are not available. */
export function stripes(ctx: CanvasRenderingContext2D, fill: string): CanvasPattern | string {
  const known = made.get(fill);
  if (known !== undefined) return known;
  const tile = tileOf(fill);
  const pattern = tile === null ? null : ctx.createPattern(tile, "repeat");
  if (pattern === null) return fill;
  made.set(fill, pattern);
  return pattern;
}

function tileOf(fill: string): HTMLCanvasElement | null {
  if (typeof document === "undefined") return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = STEP_PX;
  const ctx = tile.getContext("2d");
  if (ctx === null) return null;
  ctx.fillStyle = fill;
  ctx.fillRect(0, 0, STEP_PX, STEP_PX);
  ctx.strokeStyle = stripeOn(fill);
  ctx.lineWidth = 1.5;
  for (const x of [-STEP_PX, 0, STEP_PX]) {
    ctx.moveTo(x - 1, STEP_PX + 1);
    ctx.lineTo(x + STEP_PX + 1, -1);
  }
  ctx.stroke();
  return tile;
}
