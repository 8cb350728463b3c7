/** Names of CSS variables of `style.css`, without `--hm-`, whose values canvases need. */
const VARIABLES = [
  "font", // family list for `ctx.font`
  "text",
  "faint",
  "line", // hairlines and grids
  "surface",
  "shade", // slightly different from the surface: tracks of bars, hovered rows
  "accent",
  "error",
  "warning",
  "good",
] as const;

/** Values of the notebook's theme for canvases; everything else uses CSS variables. */
export type Theme = Record<(typeof VARIABLES)[number], string>;

/**
 * Colours of ranks, the same in every theme and in the static picture (`EITHER` in `colours.py`):
 * the result of a search for a contrast of 3:1 on white and on dark pages, and a large distance for
 * every kind of colour vision (CIE76 >= 23).
 */
export const PALETTE: readonly string[] = [
  "#5090ff",
  "#e07010",
  "#7040ff",
  "#d02030",
  "#507070",
  "#d070c0",
  "#a09070",
  "#c000c0",
];

/** Lines of ranks 0-7 are solid; each further eight have their own dash pattern. */
const DASHES: readonly (readonly number[])[] = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

export const colorOf = (rank: number): string => PALETTE[rank % PALETTE.length] as string;

export function dashOf(k: number): number[] {
  return [...(DASHES[Math.floor(k / 8) % DASHES.length] ?? [])];
}

/** Reads the current theme at `root`, the element with our variables. */
export function readTheme(root: HTMLElement): Theme {
  root.dataset.theme = isDarkAt(root) ? "dark" : "light";
  const style = getComputedStyle(root);
  const read = (name: string) => style.getPropertyValue(`--hm-${name}`).trim();
  return Object.fromEntries(VARIABLES.map((name) => [name, read(name)])) as Theme;
}

function isDarkAt(root: HTMLElement): boolean {
  const { body } = document;
  const light = body.dataset.jpThemeLight;
  if (light !== undefined) return light === "false";
  if (body.matches(".vscode-dark, .vscode-high-contrast:not(.vscode-high-contrast-light)")) {
    return true;
  }
  if (body.matches(".vscode-light")) return false;
  return isDarkColor(backgroundOf(root));
}

/** The first background behind `element` that is not transparent. */
function backgroundOf(element: HTMLElement | null): string {
  for (let at = element; at !== null; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (color && color !== "transparent" && !/,\s*0\)$/.test(color)) return color;
  }
  return "";
}

function isDarkColor(color: string): boolean {
  const [r, g, b] = (color.match(/[\d.]+/g) ?? []).map(Number);
  if (r === undefined || g === undefined || b === undefined) return false;
  return 0.299 * r + 0.587 * g + 0.114 * b < 128;
}

/** Calls back when the notebook's theme may have changed; the return value unsubscribes. */
export function watchTheme(changed: () => void): () => void {
  const observer = new MutationObserver(changed);
  observer.observe(document.body, {
    attributes: true,
    attributeFilter: ["class", "data-jp-theme-light", "data-jp-theme-name"],
  });
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["class"] });
  return () => observer.disconnect();
}
