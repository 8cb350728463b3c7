import { num } from "../columns";

/** Names with their own sums; all others share the last slot. */
export const SLOTS = 32;
export const OTHER_SLOT = SLOTS - 1;

/** Maximum number of bins of a row; beyond it, pairs of bins are merged. */
export const MOST_BINS = 8192;
const FIRST_WIDTH_S = 2 ** -14;

/**
 * Seconds per name in bins of equal width since the launch. The appearance of a row from afar is
 * computed from these, for any number of spans; and it stays available when the spans themselves
 * had to be dropped. Widths are powers of two, so that bins fill columns of the drawing, whose
 * widths are powers of two as well, without remainder.
 */
export class Bins {
  widthS = FIRST_WIDTH_S;
  private readonly bySlot: (Float32Array | undefined)[] = new Array(SLOTS).fill(undefined);

  add(startS: number, durationS: number, slot: number): void {
    const from = Math.max(0, startS);
    const until = Math.max(from, startS + durationS);
    while (until >= this.widthS * MOST_BINS) this.halve();
    this.bySlot[slot] ??= new Float32Array(MOST_BINS);
    const bins = this.bySlot[slot] as Float32Array;
    const last = Math.floor(until / this.widthS);
    for (let bin = Math.floor(from / this.widthS); bin <= last; bin++) {
      const begin = Math.max(from, bin * this.widthS);
      const end = Math.min(until, (bin + 1) * this.widthS);
      bins[bin] = num(bins, bin) + (end - begin);
    }
  }

  /**
   * Adds the seconds of every slot to `sums[column * SLOTS + slot]`; bins at the ends count in
   * part.
   */
  addTo(sums: Float64Array, fromS: number, columnS: number, n_columns: number): void {
    for (let slot = 0; slot < SLOTS; slot++) {
      const bins = this.bySlot[slot];
      if (bins === undefined) continue;
      for (let column = 0; column < n_columns; column++) {
        const from = (fromS + column * columnS) / this.widthS;
        const seconds = sumBetween(bins, from, from + columnS / this.widthS);
        sums[column * SLOTS + slot] = num(sums, column * SLOTS + slot) + seconds;
      }
    }
  }

  private halve(): void {
    this.widthS *= 2;
    for (const bins of this.bySlot) {
      if (bins === undefined) continue;
      for (let i = 0; i < MOST_BINS / 2; i++) bins[i] = num(bins, 2 * i) + num(bins, 2 * i + 1);
      bins.fill(0, MOST_BINS / 2);
    }
  }
}

/** Seconds between two positions, measured in bins. */
function sumBetween(bins: Float32Array, from: number, until: number): number {
  const [begin, end] = [Math.max(0, from), Math.min(MOST_BINS, until)];
  if (end <= begin) return 0;
  const first = Math.ceil(begin);
  const last = Math.floor(end);
  if (first > last) return num(bins, last) * (end - begin);
  let seconds = 0;
  for (let bin = first; bin < last; bin++) seconds += num(bins, bin);
  if (first > begin) seconds += num(bins, first - 1) * (first - begin);
  if (end > last) seconds += num(bins, last) * (end - last);
  return seconds;
}
