import { useId, useRef, useState } from "preact/hooks";
import { save } from "../download";
import type { Range } from "../range";
import type { CurvesProps } from "../view/props";
import { Section } from "../view/Section";
import { useWidth } from "../view/useWidth";
import { Chart, type ChartProps } from "./Chart";
import { picture } from "./picture";
import type { Plot } from "./plot";
import { type Options, ranksOf } from "./shape";
import type { Metric } from "./store";
import { Chooser, Tools } from "./tools";
import { csv } from "./values";

/** Charts that are shown before the reader chooses. */
export const FIRST_SHOWN = 6;
/** How long the kernel may take to begin with a file before this page writes what it knows. */
const KERNEL_PATIENCE_MS = 3000;
const GAP_PX = 20;
/** Lines of single ranks help while they are few. */
const FEW_RANKS = 16;
const FEW_OPTIONS: Options = { mode: "both", smoothing: 0, isLog: false };
const MANY_OPTIONS: Options = { ...FEW_OPTIONS, mode: "mean" };

/** Charts side by side: none narrower than about 320 pixels. */
export function columnsFor(widthPx: number, n_charts: number): number {
  const most = widthPx >= 1000 ? 3 : widthPx >= 660 ? 2 : 1;
  const fitting = most === 3 && n_charts === 4 ? 2 : most; // two and two, not three and one
  return Math.max(1, Math.min(fitting, n_charts));
}

/** First and last step of any of the metrics. */
export function wholeOf(metrics: readonly Metric[]): Range {
  const extents = metrics.map((metric) => metric.extent()).filter((extent) => extent !== null);
  if (extents.length === 0) return [0, 1];
  return [Math.min(...extents.map((e) => e[0])), Math.max(...extents.map((e) => e[1]))];
}

export function Curves(props: CurvesProps) {
  const { store, theme, ask } = props;
  const all = [...store.metrics.values()];
  const [chosen, setChosen] = useState<ReadonlySet<string> | null>(null);
  const [range, setRange] = useState<Range | null>(null);
  const [changed, setOptions] = useState<Options | null>(null);
  const isMany = all.some((metric) => ranksOf(metric).length > FEW_RANKS);
  const options = changed ?? (isMany ? MANY_OPTIONS : FEW_OPTIONS);
  const [told, setTold] = useState("");
  const plots = useRef(new Map<string, Plot>());
  const [widthPx, grid] = useWidth();
  if (all.length === 0) return null;
  const shown = all.filter((metric, k) => (chosen ? chosen.has(metric.name) : k < FIRST_SHOWN));
  const n_columns = columnsFor(widthPx, shown.length);
  const savePng = () =>
    picture(shown, props, plots.current, n_columns, theme, (blob) =>
      save(blob, `${props.gangId}_curves.png`),
    );
  const saveCsv = async () => setTold(await csvFrom(props, all));
  const chooser = all.length > FIRST_SHOWN && (
    <Chooser names={all.map((m) => m.name)} shown={shown.map((m) => m.name)} choose={setChosen} />
  );
  return (
    <Section
      name="curves"
      title="Curves"
      note={told || hint(range)}
      tools={
        <>
          {chooser}
          <Tools
            options={options}
            hasRanks={all.some((metric) => ranksOf(metric).length > 1)}
            change={setOptions}
            isZoomed={range !== null}
            reset={() => setRange(null)}
            savePng={savePng}
            saveCsv={saveCsv}
          />
        </>
      }
    >
      <div
        class="hm-charts"
        ref={grid}
        style={{ gridTemplateColumns: `repeat(${n_columns}, 1fr)` }}
      >
        {widthPx > 0 && (
          <Charts
            {...{ store, theme, ask, options, range }}
            look={setRange}
            rows={props}
            metrics={shown}
            plots={plots.current}
            widthPx={Math.floor((widthPx - GAP_PX * (n_columns - 1)) / n_columns)}
          />
        )}
      </div>
    </Section>
  );
}

interface ChartsProps extends Omit<ChartProps, "metric" | "whole" | "syncKey" | "known"> {
  metrics: readonly Metric[];
  /** Where the section finds them for its picture. */
  plots: Map<string, Plot>;
}

/** One beside the other; they share steps and crosshair. */
function Charts({ metrics, plots, ...common }: ChartsProps) {
  const syncKey = useId();
  const whole = wholeOf(metrics);
  const known = (name: string, plot: Plot | null) => {
    if (plot === null) plots.delete(name);
    else plots.set(name, plot);
  };
  return metrics.map((metric) => (
    <Chart key={metric.name} {...{ ...common, metric, whole, syncKey, known }} />
  ));
}

const hint = (range: Range | null) =>
  range === null
    ? "by step; drag to zoom"
    : `steps ${Math.ceil(range[0])}–${Math.floor(range[1])}; shift+drag moves, double-click shows all`;

/** Asks the kernel for all points; when it does not answer, saves the buckets known here. */
async function csvFrom({ ask, gangId }: CurvesProps, metrics: readonly Metric[]): Promise<string> {
  const patience = new Promise<null>((gaveUp) => setTimeout(gaveUp, KERNEL_PATIENCE_MS, null));
  const answer = await Promise.race([ask({ do: "csv" }), patience]);
  if (answer?.ok) return "";
  save(new Blob([csv(metrics)], { type: "text/csv" }), `${gangId}_curves.csv`);
  const why = answer?.text ? `the kernel said: ${answer.text}` : "the kernel did not answer";
  return `${why}; saved the averages this page has`;
}
