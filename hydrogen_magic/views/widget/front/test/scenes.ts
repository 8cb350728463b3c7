/** Eight ranks with 50,000 spans each, and what a timeline needs to draw them. */
import type { Range } from "../src/range";
import type { Theme } from "../src/theme";
import { NameColors } from "../src/timeline/colors";
import type { Scene } from "../src/timeline/draw";
import { GUTTER_PX, layout } from "../src/timeline/layout";
import { SpanStore } from "../src/timeline/store";
import { NAMES, packSpans, trainingSpans } from "./data";

export const THEME: Theme = {
  font: "sans-serif",
  text: "#1f1f1f",
  faint: "#616161",
  line: "#e0e0e0",
  surface: "#ffffff",
  shade: "#f2f2f2",
  accent: "#1565c0",
  error: "#c62828",
  warning: "#8a5a00",
  good: "#1f7a33",
};

export function bigStore(n_ranks = 8, n_spans = 50_000): SpanStore {
  const store = new SpanStore();
  store.apply(NAMES, [], []);
  for (let rank = 0; rank < n_ranks; rank++) {
    const spans = trainingSpans(rank, n_spans / 5).filter((span) => span.depth === 0);
    const { deltas, buffers } = packSpans([{ rank, track: "spans", spans }]);
    store.apply([], deltas, buffers);
  }
  return store;
}

export function sceneOf(store: SpanStore, range: Range, widthPx = 1000): Scene {
  return {
    store,
    layout: layout(store.lanes(), new Set(), new Set()),
    scale: { range, leftPx: GUTTER_PX, widthPx },
    theme: THEME,
    colors: new NameColors(),
    highlight: null,
    phaseOf: () => "",
    endS: store.endS,
    pixelRatio: 2,
  };
}

/** A canvas context that counts what is drawn and draws nothing. */
export function fakeContext() {
  const calls = { rects: 0, points: 0, fills: 0, texts: [] as string[] };
  const ctx = {
    fillStyle: "",
    font: "",
    globalAlpha: 1,
    textAlign: "left",
    textBaseline: "middle",
    setTransform() {},
    clearRect() {},
    save() {},
    restore() {},
    beginPath() {},
    rect() {},
    clip() {},
    fillRect: () => void calls.rects++,
    lineTo: () => void calls.points++,
    fill: () => void calls.fills++,
    fillText: (text: string) => void calls.texts.push(text),
    measureText: (text: string) => ({ width: text.length * 6 }),
  };
  return { ctx: ctx as unknown as CanvasRenderingContext2D, calls };
}
