/**
 * A page with the charts and the timeline of a made-up run, to look at while working on them:
 * bundle this file with the options of `npm run build` and `--jsx=automatic` beside demo.html as
 * demo.js, and serve the folder. `?theme=dark&np=40&metrics=8&steps=1300&idle=1` vary it;
 * `benchmark()` in the console times the drawing.
 */
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import uplotStyles from "uplot/dist/uPlot.min.css";
import { Curves } from "../../src/curves";
import curveStyles from "../../src/curves/curves.css";
import { CurveStore } from "../../src/curves/store";
import { type Ack, ALL_RANKS, type Command } from "../../src/protocol";
import styles from "../../src/style.css";
import { readTheme, type Theme } from "../../src/theme";
import { Timeline } from "../../src/timeline";
import { draw } from "../../src/timeline/draw";
import { SpanStore } from "../../src/timeline/store";
import timelineStyles from "../../src/timeline/timeline.css";
import { bigStore, LOOKS, rangeIn, sceneOf } from "../bench/scenes";
import { bucketsOf, NAMES, packCurve, packSpans, phaseSpans, random, trainingSpans } from "./data";

const options = new URLSearchParams(location.search);
const np = Number(options.get("np") ?? 4);
const n_steps = Number(options.get("steps") ?? 1300);
const n_metrics = Number(options.get("metrics") ?? 4);
const width = Number(options.get("width") ?? (n_steps > 1024 ? 2 : 1));
const curves = new CurveStore();
const spans = new SpanStore();
type Point = readonly [number, number];

function pointsOf(metric: string, rank: number): Point[] {
  const noise = random(rank + 31 * metric.length);
  return Array.from({ length: n_steps }, (_, step) => {
    const t = step / n_steps;
    const wobble = noise() - 0.5;
    if (metric === "loss")
      return [step, 2.9 * Math.exp(-3 * t) + 0.24 + (0.1 + 0.4 * (1 - t)) * wobble + 0.02 * rank];
    if (metric === "accuracy") return [step, 0.97 - 0.85 * Math.exp(-4 * t) + 0.03 * wobble];
    if (metric === "lr")
      return [step, 3e-4 * (t < 0.05 ? t / 0.05 : 0.5 * (1 + Math.cos(Math.PI * t)))];
    return [step, 1.4 * Math.exp(-2 * t) + 0.3 * wobble * wobble + 0.6];
  });
}

function fillCurves() {
  const names = [
    "loss",
    "accuracy",
    "lr",
    "grad_norm",
    "val/loss",
    "tokens_per_s",
    "memory",
    "temperature",
  ];
  for (const metric of names.slice(0, n_metrics)) {
    const all = Array.from({ length: np }, (_, rank) => ({ rank, points: pointsOf(metric, rank) }));
    const badStep = Math.floor(n_steps * 0.92);
    const series = all.map(({ rank, points }) =>
      metric === "grad_norm" && rank === 1
        ? { rank, buckets: bucketsOf(points.slice(0, badStep), width), badStep }
        : { rank, buckets: bucketsOf(points, width) },
    );
    const summary = {
      rank: ALL_RANKS,
      buckets: bucketsOf(
        all.flatMap(({ points }) => points),
        width,
      ),
    };
    const { delta, buffers } = packCurve(metric, width, [...series, summary]);
    curves.apply([delta], buffers);
  }
}

function fillSpans() {
  const ranks = Array.from({ length: np }, (_, rank) => rank);
  const lanes = ranks.flatMap((rank) => [
    { rank, track: "phases", spans: phaseSpans(rank) },
    ...(options.has("idle") ? [] : [{ rank, track: "spans", spans: trainingSpans(rank, n_steps) }]),
  ]);
  const { deltas, buffers } = packSpans(lanes);
  spans.apply(NAMES, deltas, buffers);
}

const asked: Command[] = [];
const ask = async (command: Command): Promise<Ack> => {
  asked.push(command);
  if (command.do === "detail") answer(command);
  return { kind: "ack", to: "demo", id: "1", ok: command.do !== "csv", text: "no files in a demo" };
};

function answer({ metric, from, until }: Extract<Command, { do: "detail" }>) {
  const inside = ([step]: Point) => step >= from && step < until;
  const series = Array.from({ length: np }, (_, rank) => pointsOf(metric, rank).filter(inside));
  const all = [...series, series.flat()].map((points, k) => ({
    rank: k === np ? ALL_RANKS : k,
    buckets: bucketsOf(points, 1),
  }));
  const { delta, buffers } = packCurve(metric, 1, all);
  curves.applyDetail({ ...delta, kind: "detail", to: "", id: "", from, until }, buffers);
  changed();
}

let changed = () => {};

function Demo() {
  const root = useRef<HTMLDivElement>(null);
  const [theme, setTheme] = useState<Theme | null>(null);
  const [version, setVersion] = useState(1);
  changed = () => setVersion((v) => v + 1);
  useEffect(() => setTheme(readTheme(root.current as HTMLDivElement)), []);
  const told = { version, theme: theme as Theme, ask, np, isLive: false, gangId: "demo" };
  const common = { ...told, ranks: new Map() };
  return (
    <div class="hm" ref={root}>
      {theme && <Curves {...common} store={curves} />}
      {theme && (
        <Timeline
          {...common}
          store={spans}
          isPaged={false}
          phaseOf={() => ""}
          nowS={() => spans.endS}
        />
      )}
    </div>
  );
}

fillCurves();
fillSpans();
document.body.dataset.jpThemeLight = String(options.get("theme") !== "dark");
const style = document.createElement("style");
style.textContent = [uplotStyles, styles, curveStyles, timelineStyles].join("\n");
document.head.append(style);
const root = document.createElement("div");
document.body.append(root);
render(<Demo />, root);
/** Milliseconds per frame, painting included: reading a pixel waits for the raster. */
function benchmark() {
  const store = bigStore();
  const canvas = document.createElement("canvas");
  const ctx = canvas.getContext("2d") as CanvasRenderingContext2D;
  return LOOKS.map((share) => {
    const scene = sceneOf(store, rangeIn(store, share));
    [canvas.width, canvas.height] = [2 * 1076, 2 * scene.layout.heightPx];
    const frames = Array.from({ length: 30 }, () => {
      const begin = performance.now();
      draw(ctx, scene);
      const drawn = performance.now();
      ctx.getImageData(0, 0, 1, 1);
      return [drawn - begin, performance.now() - begin] as const;
    });
    const median = (k: 0 | 1) =>
      frames
        .map((f) => f[k])
        .sort((a, b) => a - b)[15]
        ?.toFixed(2);
    return `1/${1 / share} of the run: ${median(0)} ms, with raster ${median(1)} ms`;
  });
}

Object.assign(window, {
  benchmark,
  spans,
  curves,
  asked,
  changed: () => changed(),
});
