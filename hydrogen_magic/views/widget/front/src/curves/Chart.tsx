import { useEffect, useRef, useState } from "preact/hooks";
import { Painter } from "../painter";
import { byKey, clamp, type Range } from "../range";
import type { Theme } from "../theme";
import type { Ask } from "../view/props";
import { RankValues, Summary } from "./legend";
import { Plot } from "./plot";
import { firstBad, type Options, shape } from "./shape";
import type { CurveStore, Metric } from "./store";
import { useDetail } from "./useDetail";
import { type Rows, readAt, readLast } from "./values";

/** Minimum interval between repaints while data arrives. */
const PAINT_INTERVAL_MS = 100;
/** Minimum width of a range, in steps. */
const LEAST_STEPS = 4;

/** Paints a chart as it is now, which those out of sight are not, and returns its canvas. */
export type Drawn = () => HTMLCanvasElement | null;

export interface ChartProps {
  store: CurveStore;
  metric: Metric;
  rows: Rows;
  options: Options;
  /** The steps of all charts; null: all there are. */
  range: Range | null;
  /** The steps of any chart. */
  whole: Range;
  theme: Theme;
  widthPx: number;
  /** Charts with the same key share their crosshair. */
  syncKey: string;
  ask: Ask;
  look: (range: Range | null) => void;
  /** Its name, or the part that differs from its neighbours. */
  title: string;
  isPinned: boolean;
  pin: () => void;
  /** Notifies the section of a chart that was added or removed, for its picture. */
  known: (name: string, drawn: Drawn | null) => void;
}

/**
 * The steps of this chart: those of all charts, unless its own are so few that they would be a dot.
 */
export function rangeOf(metric: Metric, range: Range | null, whole: Range): Range {
  const own = metric.extent() ?? whole;
  const isShort = own[1] - own[0] < (whole[1] - whole[0]) / 4;
  const shown = range ?? (isShort ? own : whole);
  return shown[1] > shown[0] ? shown : [shown[0] - 0.5, shown[0] + 0.5];
}

export function Chart(props: ChartProps) {
  const { metric, whole, range, theme, widthPx, options } = props;
  const box = useRef<HTMLDivElement>(null);
  const [step, setStep] = useState<number | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const shown = rangeOf(metric, range, whole);
  const painter = usePlot(box, latest, setStep);
  useDetail(props.store, metric, range, widthPx, props.ask);
  // the dependencies of a repaint
  useEffect(() => painter.current?.ask(), [metric.version, whole[0], whole[1]]);
  // interactions are painted at once
  useEffect(() => painter.current?.askNow(), [range, theme, widthPx, options]);
  const drawn = (range && props.store.detailFor(metric.name, ...shown)?.metric) || metric;
  const reading = (step === null ? null : readAt(drawn, step)) ?? readLast(metric, props.rows);
  const keys = (event: KeyboardEvent) => lookByKey(event, shown, whole, props.look);
  return (
    <figure class="hm-chart" aria-label={`${metric.name} by step`}>
      <figcaption>
        <Pin name={metric.name} isPinned={props.isPinned} pin={props.pin} />
        <b title={metric.name}>{props.title}</b>
        {reading && <Summary metric={drawn} reading={reading} isLogAsked={options.isLog} />}
      </figcaption>
      <div
        class="hm-plot"
        ref={box}
        role="img"
        // biome-ignore lint/a11y/noNoninteractiveTabindex: keys move and zoom what is shown
        tabIndex={0}
        onKeyDown={keys}
        aria-label={told(metric)}
      />
      {reading && <RankValues metric={metric} reading={reading} bad={firstBad(metric)} />}
    </figure>
  );
}

function Pin({ name, isPinned, pin }: { name: string; isPinned: boolean; pin: () => void }) {
  const title = isPinned ? `Unpin ${name}` : `Pin ${name}: show it first, in other gangs too`;
  return (
    <button
      type="button"
      class="hm-pin"
      aria-pressed={isPinned}
      aria-label={`Pin ${name}`}
      title={title}
      onClick={pin}
    >
      <svg viewBox="0 0 12 12" aria-hidden="true">
        <path d="M4 1h4L7.5 5 10 7.5H2L4.5 5zM6 7.5V11" />
      </svg>
    </button>
  );
}

const told = (metric: Metric) =>
  `curve of ${metric.name}; arrow keys move, plus and minus zoom, 0 shows all`;

function lookByKey(
  event: KeyboardEvent,
  shown: Range,
  whole: Range,
  look: (range: Range | null) => void,
): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const moved = event.key === "Escape" ? "whole" : byKey(event.key, shown, whole, LEAST_STEPS);
  if (moved === null) return;
  event.preventDefault();
  look(moved === "whole" ? null : moved);
}

type Latest = { current: ChartProps };

function usePlot(
  box: { current: HTMLDivElement | null },
  latest: Latest,
  hover: (step: number | null) => void,
) {
  const painter = useRef<Painter | null>(null);
  const { name } = latest.current.metric;
  // a plot exists as long as its element
  useEffect(() => {
    const element = box.current as HTMLDivElement;
    const plot = new Plot(element, latest.current.syncKey, {
      hover,
      look: (range) => latest.current.look(clamp(range, latest.current.whole)),
      lookAtAll: () => latest.current.look(null),
    });
    const made = new Painter(() => paint(plot, latest.current), PAINT_INTERVAL_MS);
    made.watch(element);
    made.ask();
    painter.current = made;
    latest.current.known(name, () => {
      paint(plot, latest.current);
      return plot.canvas;
    });
    return () => {
      latest.current.known(name, null);
      made.end();
      plot.end();
    };
  }, [name]);
  return painter;
}

function paint(plot: Plot, props: ChartProps): void {
  const { metric, store, theme, widthPx } = props;
  const range = rangeOf(metric, props.range, props.whole);
  const detail = props.range && store.detailFor(metric.name, ...range);
  const badStep = firstBad(metric)?.step ?? null;
  plot.paint({
    shape: shape(detail?.metric ?? metric, props.options),
    range,
    badStep,
    theme,
    widthPx,
  });
}
