import type { Theme } from "../theme";

/**
 * Names that training has everywhere; each keeps its colour, and its place in a stack. Negotiation is
 * a coordinator's: ranks wait until all of them have a tensor, which then is reduced.
 */
const KINDS: readonly [string, RegExp][] = [
  ["data", /\bdata|loader|fetch|prefetch|input|\bh2d\b|next\(/i],
  ["forward", /forward|\bfwd\b|predict|inference/i],
  ["backward", /backward|\bbwd\b/i],
  [
    "collective",
    /^(?!negotiate\b).*(all_?(reduce|gather|to_?all)|reduce_?scatter|broadcast|barrier|nccl|gloo|mpi[_ ]|collective|\bhvd\.)/i,
  ],
  ["optimizer", /optimi[sz]er|\bzero_grad|\.step\b/i],
  ["checkpoint", /checkpoint|ckpt|\bsav(e|ing)\b/i],
  ["negotiation", /^negotiate\b|^waiting for rank/i],
];

/**
 * Colours of the kinds, then of other names, the same in every theme and in the static picture
 * (`fills.py`): the result of a search for a contrast of 1.6:1 on white and on dark pages, and a
 * distance of at least 28 (CIE76) for every kind of colour vision.
 */
export const FILLS: readonly string[] = [
  "#f89000",
  "#3080a0",
  "#403090",
  "#d060f8",
  "#80d0f8",
  "#702010",
  "#c04000",
  "#9010f8",
  "#908060",
  "#f8c080",
  "#503040",
  "#c0d0c0",
];

export const N_KINDS = KINDS.length;

/** Index of a name's kind; -1 for a name of the user's own. */
export function kindOf(name: string): number {
  return KINDS.findIndex(([, pattern]) => pattern.test(name));
}

function hash(text: string): number {
  let h = 2166136261; // FNV-1a
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 16777619);
  return h >>> 0;
}

/** The colour of a name; names of the user keep theirs from run to run if it is free. */
export class NameColors {
  private readonly indices = new Map<string, number>();
  private readonly taken = new Map<number, number>();

  indexOf(name: string): number {
    const known = this.indices.get(name);
    if (known !== undefined) return known;
    const kind = kindOf(name);
    const index = kind >= 0 ? kind : N_KINDS + this.free(hash(name));
    this.indices.set(name, index);
    return index;
  }

  fill(name: string, theme: Theme): string {
    if (name === "other") return theme.faint;
    return FILLS[this.indexOf(name)] ?? theme.faint;
  }

  /** The wanted colour, or the next one with fewer names. */
  private free(wanted: number): number {
    const n = FILLS.length - N_KINDS;
    const uses = (k: number) => this.taken.get(k) ?? 0;
    const fewest = Math.min(...Array.from({ length: n }, (_, k) => uses(k)));
    let k = wanted % n;
    while (uses(k) > fewest) k = (k + 1) % n;
    this.taken.set(k, uses(k) + 1);
    return k;
  }
}

function channel(value: number): number {
  const c = value / 255;
  return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
}

/** Black or white, whichever has more contrast on a `#rrggbb` fill. */
export function inkOn(fill: string): string {
  const value = Number.parseInt(fill.slice(1, 7), 16);
  if (Number.isNaN(value) || !fill.startsWith("#")) return "#000000";
  const [r, g, b] = [channel(value >> 16), channel((value >> 8) & 255), channel(value & 255)];
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

/** The phase of a rank: inconspicuous as long as all is well. */
export function phaseFill(phase: string, theme: Theme): string {
  if (phase === "failed") return theme.error;
  if (phase === "done") return theme.good;
  return phase === "running" ? theme.accent : theme.faint;
}
