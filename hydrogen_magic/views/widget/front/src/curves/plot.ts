import uPlot from "uplot";
import { count } from "../format";
import { figure, tickLabel } from "../numbers";
import type { Range } from "../range";
import { colorOf, dashOf, type Theme } from "../theme";
import type { Line, Shape, Values } from "./shape";

export const PLOT_HEIGHT_PX = 150;

/** User interactions in a plot. */
export interface PlotActions {
  /** Steps at the pointer; null after it left. */
  hover: (step: number | null) => void;
  look: (range: Range) => void;
  lookAtAll: () => void;
}

/** Everything that one repaint needs. */
export interface PlotInput {
  shape: Shape;
  range: Range;
  /** First step with a non-finite value. */
  badStep: number | null;
  theme: Theme;
  widthPx: number;
}

const FONT_PX = 11;
/** Width of a letter of a label. */
const LETTER_PX = 6.3;

/** Limits of a linear axis: a small margin, and no negative numbers for non-negative values. */
export function airy(low: number, high: number): Range {
  const spread = high - low;
  const pad = spread > 0 ? spread * 0.06 : Math.abs(low) * 0.05 || 1;
  const from = low - pad;
  return [low >= 0 && from < 0 ? 0 : from, high + pad];
}

/** Digits of the ticks of a logarithmic axis, fewest first; with many decades, only some powers. */
const LOG_DIGITS = [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]];
const MOST_LOG_TICKS = 6;

/** As many round ticks as fit; all of them are labelled. */
export function logTicks(low: number, high: number): number[] {
  const [first, last] = [Math.floor(Math.log10(low)), Math.floor(Math.log10(high))];
  const isInside = (tick: number) => tick >= low && tick <= high;
  const powers = Array.from({ length: last - first + 1 }, (_, k) => first + k);
  const whole = powers.map((power) => Number(`1e${power}`)).filter(isInside);
  const stride = Math.ceil(whole.length / MOST_LOG_TICKS);
  if (stride > 1) return whole.filter((_, k) => k % stride === 0);
  const choices = LOG_DIGITS.map((digits) =>
    powers.flatMap((p) => digits.map((digit) => Number(`${digit}e${p}`))).filter(isInside),
  );
  const best = choices.findLast((ticks) => ticks.length <= MOST_LOG_TICKS) ?? whole;
  return best.length > 1 ? best : evenTicks(low, high);
}

/** If only a small part of a decade is visible, its ticks are as far apart as linear ones. */
function evenTicks(low: number, high: number): number[] {
  const power = 10 ** Math.floor(Math.log10((high - low) / 2));
  const step = [5, 2, 1].map((digit) => digit * power).find((s) => (high - low) / s >= 2) ?? power;
  const first = Math.ceil(low / step - 1e-9);
  const n = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: n }, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

/** Labels of the ticks of a logarithmic axis. */
export function logLabels(ticks: readonly number[]): string[] {
  const gap = (ticks[1] ?? 0) - (ticks[0] ?? 0);
  const isEven = ticks.every((tick, k) => k === 0 || near(tick - (ticks[k - 1] ?? 0), gap));
  return ticks.map((tick) => tickLabel(tick, isEven && gap > 0 ? gap : tick));
}

const near = (a: number, b: number) => Math.abs(a - b) < 1e-6 * Math.abs(b);

const withAlpha = (color: string, alpha: number) =>
  /^#[0-9a-f]{6}$/i.test(color)
    ? color +
      Math.round(alpha * 255)
        .toString(16)
        .padStart(2, "0")
    : `color-mix(in srgb, ${color} ${alpha * 100}%, transparent)`;

const HALO_PX = 5;
const POINT_PX = 6;

/** Indices of values without a neighbour in their line, which shows nothing of them. */
export function isolated(values: Values): number[] {
  const found: number[] = [];
  let previous: number | null = null;
  let isAlone = false;
  const leave = () => {
    if (isAlone && previous !== null) found.push(previous);
  };
  values.forEach((value, k) => {
    if (value === undefined) return;
    if (value === null) {
      leave();
      previous = null;
    } else {
      isAlone = previous === null;
      previous = k;
    }
  });
  leave();
  return found;
}

/** `isThin`: a mean is drawn over the lines of ranks. */
function seriesOf({ role, rank, isFaint }: Line, theme: Theme, isThin: boolean): uPlot.Series {
  const base: uPlot.Series = { points: { show: false } };
  const point = (fill: string): uPlot.Series.Points => ({
    show: false,
    filter: (u, series) => isolated(u.data[series] as Values),
    size: POINT_PX,
    width: 0,
    fill,
  });
  // An edge, since a single spike is a band of no width.
  if (role === "high" || role === "low") {
    return { ...base, width: 1, stroke: withAlpha(theme.text, 0.25) };
  }
  if (role === "halo") return { ...base, width: HALO_PX, stroke: withAlpha(theme.text, 0.16) };
  if (role === "mean") {
    const stroke = withAlpha(theme.text, isFaint ? 0.25 : 1);
    return { ...base, width: isFaint ? 1 : 1.5, stroke, points: point(stroke) };
  }
  const alpha = isFaint ? 0.25 : isThin ? 0.6 : 0.9;
  const stroke = withAlpha(colorOf(rank), alpha);
  const width = isFaint || isThin ? 1 : 1.25;
  return { ...base, width, stroke, dash: dashOf(rank), points: point(stroke) };
}

/** One uPlot; it is created again only if its lines or the theme change. */
export class Plot {
  private chart: uPlot | null = null;
  private built = "";
  private theme: Theme | null = null;
  private input: PlotInput | null = null;

  constructor(
    private readonly element: HTMLElement,
    private readonly syncKey: string,
    private readonly actions: PlotActions,
  ) {}

  /** The canvas, for a picture of it. */
  get canvas(): HTMLCanvasElement | null {
    return this.chart?.ctx.canvas ?? null;
  }

  paint(input: PlotInput): void {
    const { shape, theme } = input;
    this.input = input;
    const data = [shape.steps, ...shape.values] as uPlot.AlignedData;
    const wanted = `${shape.isLog} ${shape.lines.map((l) => l.role + l.rank + l.isFaint).join()}`;
    if (this.chart === null || wanted !== this.built || theme !== this.theme) {
      this.end();
      this.chart = new uPlot(this.options(input), data, this.element);
      [this.built, this.theme] = [wanted, theme];
    } else if (this.chart.width !== input.widthPx) {
      this.chart.setData(data, false);
      this.chart.setSize({ width: input.widthPx, height: PLOT_HEIGHT_PX });
    } else this.chart.setData(data, false);
    const { chart } = this;
    // without a batch it draws later, and a picture of it would be that of before
    chart.batch(() => chart.setScale("x", { min: input.range[0], max: input.range[1] }));
  }

  end(): void {
    this.chart?.destroy();
    this.chart = null;
  }

  private options({ shape, theme, widthPx }: PlotInput): uPlot.Options {
    const isThin = shape.lines.some((line) => line.role === "mean");
    const isBanded = shape.lines[0]?.role === "high";
    return {
      width: widthPx,
      height: PLOT_HEIGHT_PX,
      padding: [6, (u) => Math.max(10, 4 + stepWidth(u) / 2), 0, 0],
      legend: { show: false },
      series: [{}, ...shape.lines.map((line) => seriesOf(line, theme, isThin))],
      bands: isBanded ? [{ series: [1, 2], fill: withAlpha(theme.text, 0.1) }] : [],
      scales: {
        x: { time: false, auto: false },
        y: shape.isLog
          ? { distr: 3, range: (_, low, high) => [(low ?? 1) / 1.08, (high ?? 1) * 1.08] }
          : { range: (_, low, high) => [...airy(low ?? 0, high ?? 1)] },
      },
      axes: this.axes(theme, shape.isLog),
      cursor: this.cursor(),
      hooks: {
        setCursor: [(u) => this.actions.hover(this.stepAt(u))],
        setSelect: [(u) => this.zoomTo(u)],
        draw: [(u) => this.markBad(u)],
      },
    };
  }

  private axes(theme: Theme, isLog: boolean): uPlot.Axis[] {
    const common = {
      stroke: theme.faint,
      font: `${FONT_PX}px ${theme.font}`,
      ticks: { show: false },
      grid: { stroke: theme.line, width: 1 },
      gap: 4,
    };
    return [
      {
        ...common,
        size: 20,
        space: (u) => Math.max(56, 16 + stepWidth(u)),
        grid: { show: false },
        border: { show: true, stroke: theme.line, width: 1 },
        incrs: STEP_INCREMENTS,
        values: (_, ticks) => ticks.map(stepLabel),
      },
      {
        ...common,
        space: 26,
        ...(isLog ? { splits: (_u, _axis, low, high) => logTicks(low, high), filter: all } : {}),
        size: (_, labels) =>
          Math.max(34, 10 + LETTER_PX * Math.max(0, ...(labels ?? []).map(lengthOf))),
        values: (_, ticks, _axis, _space, step) =>
          isLog ? logLabels(ticks) : ticks.map((y) => tickLabel(y, step)),
      },
    ];
  }

  private cursor(): uPlot.Cursor {
    return {
      y: false,
      points: { size: 5 },
      sync: {
        key: this.syncKey,
        scales: ["x", null],
        filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
      },
      drag: { x: true, y: false, setScale: false, dist: 4 },
      bind: {
        mousedown: (u, _, handler) => (event) => {
          if (event.shiftKey) this.startPan(u, event);
          else handler(event);
          return null;
        },
        dblclick: () => () => {
          this.actions.lookAtAll();
          return null;
        },
      },
    };
  }

  private stepAt(u: uPlot): number | null {
    const { idx, left } = u.cursor;
    if (idx === null || idx === undefined || (left ?? -1) < 0) return null;
    return u.data[0][idx] ?? null;
  }

  private zoomTo(u: uPlot): void {
    const { left, width } = u.select;
    if (width < 4) return;
    this.actions.look([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  private startPan(u: uPlot, down: MouseEvent): void {
    down.preventDefault();
    const range = this.input?.range ?? [0, 1];
    const stepsPerPx = (range[1] - range[0]) / u.over.clientWidth;
    const move = (event: MouseEvent) => {
      const by = (down.clientX - event.clientX) * stepsPerPx;
      this.actions.look([range[0] + by, range[1] + by]);
    };
    const up = () => {
      removeEventListener("mousemove", move);
      removeEventListener("mouseup", up);
    };
    addEventListener("mousemove", move);
    addEventListener("mouseup", up);
  }

  /** A line at the first non-finite value; the text under the plot explains it. */
  private markBad(u: uPlot): void {
    const { badStep, range, theme } = this.input as PlotInput;
    if (badStep === null || badStep < range[0] || badStep > range[1]) return;
    const { ctx, bbox } = u;
    const x = Math.round(u.valToPos(badStep, "x", true));
    const size = 5 * uPlot.pxRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = theme.error;
    ctx.lineWidth = uPlot.pxRatio;
    ctx.setLineDash([3 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top);
    ctx.lineTo(x + size, bbox.top);
    ctx.lineTo(x, bbox.top + 1.6 * size);
    ctx.fill();
    ctx.restore();
  }
}

const all = (_: uPlot, ticks: number[]) => ticks;

/** A step in full: `12,346`, `1,000,001`; with an exponent if it is very large. */
export const stepLabel = (step: number): string =>
  Math.abs(step) < 1e12 ? count(Math.round(step)).replace("-", "−") : figure(step);

/** Width of the label of the last step. */
const stepWidth = (u: uPlot) => LETTER_PX * stepLabel(u.scales.x?.max ?? 0).length;

const lengthOf = (label: string | number | null) => String(label ?? "").length;

/** Steps are whole numbers, and so are the ticks. */
const STEP_INCREMENTS = Array.from({ length: 16 }, (_, power) =>
  [1, 2, 5].map((digit) => digit * 10 ** power),
).flat();
