import { column, count, rate, size } from "../format";
import { shortNames } from "../names";
import type { Rank } from "../protocol";

/** More columns leave no space for progress; the curves have every metric. */
const MOST_METRICS = 4;
/** Characters of a metric's name over its column. */
const MOST_TITLE = 14;
/** Characters of a state that its column grows for. */
const MOST_STATE = 18;

/** One column of the table of ranks; figures are aligned. */
export interface Column {
  key: string;
  title: string;
  /** The title of the column. */
  short: string;
  texts: string[];
  /** `minor` is hidden in narrow notebooks, `spare` in narrower ones, `rare` in those of half a screen. */
  look: "quiet spare" | "quiet" | "number" | "number rare" | "number spare" | "number minor";
}

type TextOf = (row: Rank) => string;

/** Columns before and after the bar; empty ones are left out. */
export function columnsOf(rows: readonly Rank[]): { before: Column[]; after: Column[] } {
  const hosts = new Set(rows.map((row) => row.host).filter(Boolean)); // idle ranks have none
  const make = (title: string, look: Column["look"], text: TextOf): Column => ({
    key: title,
    title,
    short: title,
    look,
    texts: rows.map(text),
  });
  const before = [
    make("device", hosts.size > 1 ? "quiet" : "quiet spare", (row) => place(row, hosts.size > 1)),
  ];
  const after = [
    make(countTitle(rows), "number", countText),
    make("steps", "number spare", ({ steps }) => (steps > 0 ? count(steps) : "")),
    make("steps/s", "number rare", (row) => optional(row.steps_per_s, rate)),
    make("rows/s", "number", (row) => optional(rowsPerS(row) || null, rate)),
    ...metricColumns(rows),
    make("memory", "number minor", (row) => (row.rss_bytes > 0 ? size(row.rss_bytes) : "")),
    make("GPU", "number", (row) => optional(row.gpu_percent, (n) => `${Math.round(n)} %`)),
    make("GPU mem", "number minor", (row) => optional(row.gpu_memory_bytes, size)),
  ];
  return { before: filled(before), after: filled(after) };
}

/** Columns of the first metrics. */
const LOOKS = ["number", "number spare"] as const;

function metricColumns(rows: readonly Rank[]): Column[] {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.metrics)))];
  const shown = names.slice(0, MOST_METRICS);
  const short = shortNames(shown, MOST_TITLE);
  return shown.map((title, k) => ({
    key: `metric ${title}`,
    title,
    short: short[k] ?? title,
    look: LOOKS[k] ?? "number minor",
    texts: column(rows.map((row) => row.metrics[title])),
  }));
}

const filled = (columns: readonly Column[]) =>
  columns.filter(({ texts }) => texts.some((text) => text !== ""));

const optional = (n: number | null, write: (n: number) => string) => (n === null ? "" : write(n));

function countText({ bar }: Rank): string {
  if (bar === null) return "";
  const figures = bar.total === null ? [bar.n] : [bar.n, bar.total];
  return (figures.every(Number.isInteger) ? figures.map(count) : column(figures)).join("/");
}

/** The bars' own count, which does not always count optimizer steps. */
const countTitle = (rows: readonly Rank[]): string =>
  rows.some((row) => rowsPerS(row) !== null) ? "rows" : "done";

/** The rate of a rank that predicts rows; null for other ranks. */
export const rowsPerS = ({ bar }: Rank): number | null =>
  bar?.unit === "rows" && bar.total === null ? (bar.per_s ?? 0) : null;

/** The rate of the fastest rank that predicts rows, 0 if there is none. */
export const fastest = (rows: readonly Rank[]): number =>
  Math.max(0, ...rows.map((row) => rowsPerS(row) ?? 0));

const place = (row: Rank, withHost: boolean) =>
  [withHost ? row.host : "", row.device].filter(Boolean).join(" · ");

const BEFORE: ReadonlySet<string> = new Set(["waiting", "starting", "loading"]);

/** Whether a rank is not running its cell yet, which its bar shows. */
export const isBefore = ({ phase }: Rank): boolean => BEFORE.has(phase);

/** Whether a rank has a bar. */
export const hasBar = (row: Rank): boolean =>
  isBefore(row) || rowsPerS(row) !== null || Boolean(row.bar?.total);

/** The common description of the bars, if there is one. */
export function barTitle(rows: readonly Rank[]): string {
  if (fastest(rows) > 0) return "relative speed";
  const words = new Set(rows.map((row) => row.bar?.desc.trim().replace(/:$/, "") ?? ""));
  words.delete("");
  const [word = ""] = words;
  return words.size === 1 ? word : "progress";
}

/** The last column. A line does not break between a number and its unit. */
export const stateText = (row: Rank): string => activity(row).replaceAll(" %", "\u00a0%");

/** The mark's word, unless the rank's activity includes it; for a straggler, its reason instead. */
function activity({ mark, doing, phase, why }: Rank): string {
  const words = doing || phase;
  if (mark === "straggler" && why) return `${mark}: ${why}`;
  if (mark !== "" && phase !== "failed" && !words.includes(mark)) return `${mark} · ${words}`;
  return why && why !== phase && phase !== "failed" ? `${words} · ${why}` : words;
}

/** Factor of the `ch` unit of a column's title to that of its numbers. */
const SMALLER = 13 / 11;
const PADDING_CH = 1;

/** Widths that grow and never shrink, so that numbers do not move. */
export class Widths {
  private readonly widest = new Map<string, number>();

  /** CSS width for texts of tabular figures. */
  of(key: string, texts: readonly string[]): string {
    const width = Math.max(this.widest.get(key) ?? 0, ...texts.map((text) => text.length));
    this.widest.set(key, width);
    return `${Math.ceil(width * SMALLER) + PADDING_CH}ch`;
  }

  ofStates(rows: readonly Rank[]): string {
    return this.of(
      "state",
      rows.map((row) => stateText(row).slice(0, MOST_STATE)),
    );
  }
}
