/** Values of the notebook's theme for canvases; everything else uses CSS variables. */
export interface Theme {
  /** Family list for `ctx.font`. */
  font: string;
  text: string;
  faint: string;
  /** Hairlines and grids. */
  line: string;
  surface: string;
  /** Slightly different from the surface: tracks of bars, hovered rows. */
  shade: string;
  accent: string;
  error: string;
  warning: string;
  good: string;
}

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

const variable = (style: CSSStyleDeclaration, name: string, otherwise: string) =>
  style.getPropertyValue(name).trim() || otherwise;

/** Reads the current theme at `root`, the element with our variables. */
export function readTheme(root: HTMLElement): Theme {
  const isDark = isDarkAt(root);
  root.dataset.theme = isDark ? "dark" : "light";
  const style = getComputedStyle(root);
  return {
    font: variable(style, "--hm-font", "sans-serif"),
    text: variable(style, "--hm-text", isDark ? "#e4e4e4" : "#1f1f1f"),
    faint: variable(style, "--hm-faint", isDark ? "#a0a0a0" : "#616161"),
    line: variable(style, "--hm-line", isDark ? "#3a3a3a" : "#e0e0e0"),
    surface: variable(style, "--hm-surface", isDark ? "#111111" : "#ffffff"),
    shade: variable(style, "--hm-shade", isDark ? "#212121" : "#f2f2f2"),
    accent: variable(style, "--hm-accent", isDark ? "#4ba3e8" : "#1565c0"),
    error: variable(style, "--hm-error", isDark ? "#ff7b72" : "#c62828"),
    warning: variable(style, "--hm-warning", isDark ? "#e0a83c" : "#8a5a00"),
    good: variable(style, "--hm-good", isDark ? "#58b368" : "#1f7a33"),
  };
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
