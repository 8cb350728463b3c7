/** SGR colours of terminal text as runs; the result is never HTML. */

export interface Style {
  /** 0-15: the theme's own colours; a CSS colour: the rest of 256 and true colour. */
  fg?: number | string;
  bg?: number | string;
  bold?: boolean;
  faint?: boolean;
  italic?: boolean;
  underline?: boolean;
  strike?: boolean;
  inverse?: boolean;
}

export interface Run {
  text: string;
  style: Style;
}

// biome-ignore lint/suspicious/noControlCharactersInRegex: it is what SGR begins with
const SGR = /\x1b\[([0-9;:]*)m/;
/** The colour space in `38:2:SPACE:r:g:b`, which the form with semicolons does not have. */
const COLOR_SPACE = /([34]8:2:)\d*:(?=\d+:\d+:\d+)/g;

/** Splits text at its colour changes; sequences that are not colours stay in the text. */
export function parseAnsi(text: string): Run[] {
  if (!text.includes("\x1b[")) return text ? [{ text, style: {} }] : [];
  const runs: Run[] = [];
  let style: Style = {};
  text.split(SGR).forEach((part, i) => {
    if (i % 2 === 1) style = applySgr(style, part);
    else if (part) runs.push({ text: part, style });
  });
  return runs;
}

export const plainOf = (runs: readonly Run[]): string => runs.map((run) => run.text).join("");

type Flag = "bold" | "faint" | "italic" | "underline" | "strike" | "inverse";
const ON: Record<number, Flag> = {
  1: "bold",
  2: "faint",
  3: "italic",
  4: "underline",
  7: "inverse",
  9: "strike",
  21: "underline",
};
const OFF: Record<number, readonly Flag[]> = {
  22: ["bold", "faint"],
  23: ["italic"],
  24: ["underline"],
  27: ["inverse"],
  29: ["strike"],
};

/** Numbers after a colon belong to the one before: to a colour, or to a kind of underline. */
function codesOf(parameters: string): number[] {
  const all = parameters.replace(COLOR_SPACE, "$1").split(";");
  return all.flatMap((parameter) => {
    if (parameter === "4:0") return 24; // no underline
    const codes = parameter.split(":").map(Number);
    return codes[0] === 38 || codes[0] === 48 ? codes : codes.slice(0, 1);
  });
}

function applySgr(before: Style, parameters: string): Style {
  const codes = codesOf(parameters);
  let style = { ...before };
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i] ?? 0;
    if (code === 38 || code === 48) {
      const [color, n_used] = extended(codes.slice(i + 1));
      if (color !== undefined) style[code === 38 ? "fg" : "bg"] = color;
      i += n_used;
    } else style = applyCode(style, code);
  }
  return style;
}

function applyCode(style: Style, code: number): Style {
  if (code === 0) return {};
  const flag = ON[code];
  if (flag) style[flag] = true;
  for (const off of OFF[code] ?? []) delete style[off];
  if (code === 39) delete style.fg;
  if (code === 49) delete style.bg;
  const color = named(code);
  if (color !== undefined) style[isForeground(code) ? "fg" : "bg"] = color;
  return style;
}

const isForeground = (code: number) => code < 40 || (code >= 90 && code < 100);

/** 30-37 and 40-47, the bright ones 90-97 and 100-107. */
function named(code: number): number | undefined {
  const k = code % 10;
  if (k > 7) return undefined;
  const tens = code - k;
  if (tens === 30 || tens === 40) return k;
  return tens === 90 || tens === 100 ? k + 8 : undefined;
}

/** The numbers after 38 or 48: `5;n` or `2;r;g;b`, and how many of them were used. */
function extended(rest: readonly number[]): [number | string | undefined, number] {
  const [kind, a = 0, b = 0, c = 0] = rest;
  if (kind === 5) return [indexed(a), 2];
  if (kind === 2) return [`rgb(${byte(a)} ${byte(b)} ${byte(c)})`, 4];
  return [undefined, 1];
}

const byte = (n: number) => Math.min(255, Math.max(0, Math.trunc(n) || 0));

/** A colour of the 256: 16 of the theme, a cube of 6 x 6 x 6, 24 greys. */
function indexed(n: number): number | string {
  const k = byte(n);
  if (k < 16) return k;
  if (k >= 232) return `rgb(${8 + (k - 232) * 10} ${8 + (k - 232) * 10} ${8 + (k - 232) * 10})`;
  const level = (m: number) => (m === 0 ? 0 : 55 + 40 * m);
  const cube = k - 16;
  return `rgb(${level(Math.floor(cube / 36))} ${level(Math.floor(cube / 6) % 6)} ${level(cube % 6)})`;
}
