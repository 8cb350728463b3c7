import { useId, useRef, useState } from "preact/hooks";
import { save } from "../download";
import { pinnedBefore, rememberPinned } from "../memory";
import { shortNames } from "../names";
import type { Range } from "../range";
import { Button } from "../view/Button";
import type { CurvesProps } from "../view/props";
import { FoldButton, Section, useFolded } from "../view/Section";
import { useWidth } from "../view/useWidth";
import { Chart, type ChartProps, type Drawn } from "./Chart";
import { grouped, type MetricGroup, nameIn, OTHERS } from "./groups";
import { picture } from "./picture";
import { type Options, ranksOf, ranksWithCurve } from "./shape";
import type { Metric } from "./store";
import { Search, Tools } from "./tools";

/** Charts shown by default. */
export const FIRST_SHOWN = 6;
/** Charts of one group that a search shows. */
const MOST_FOUND = 24;
/** Space beside a chart's name for its pin, its step and its value. */
const VALUE_PX = 150;
/** Approximate width of a letter of a chart's name. */
const LETTER_PX = 7;
const GAP_PX = 20;
const NO_PICTURE =
  "no picture was saved: charts are folded, or too many for one picture in this browser";
/** Lines of single ranks are useful if they are few. */
const FEW_RANKS = 16;
const FEW_OPTIONS: Options = { mode: "both", smoothing: 0, isLog: false };
const MANY_OPTIONS: Options = { ...FEW_OPTIONS, mode: "mean" };

/** Charts side by side: each at least about 320 pixels wide. */
export function columnsFor(widthPx: number, n_charts: number): number {
  const most = widthPx >= 1000 ? 3 : widthPx >= 660 ? 2 : 1;
  const fitting = most === 3 && n_charts === 4 ? 2 : most; // two and two instead of three and one
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
  const [wanted, setWanted] = useState("");
  const [pinned, pin] = usePinned();
  const [range, setRange] = useState<Range | null>(null);
  const [changed, setOptions] = useState<Options | null>(null);
  const isMany = all.some((metric) => ranksWithCurve(metric).length > FEW_RANKS);
  const options = changed ?? (isMany ? MANY_OPTIONS : FEW_OPTIONS);
  const [told, setTold] = useState("");
  const charts = useRef(new Map<string, Drawn>());
  const syncKey = useId();
  const [widthPx, body] = useWidth();
  if (all.length === 0) return null;
  const groups = grouped([...store.metrics.keys()], pinned, wanted, FIRST_SHOWN);
  const savePng = async () => {
    const shown = all.filter((metric) => charts.current.has(metric.name));
    const n_columns = columnsFor(widthPx, shown.length);
    const blob = await picture(shown, props, charts.current, n_columns, theme);
    if (blob) save(blob, `${props.gangId}_curves.png`);
    setTold(blob ? "" : NO_PICTURE);
  };
  const saveCsv = async () => {
    setTold("waiting for the kernel");
    const { ok, text } = await ask({ do: "csv" });
    setTold(ok ? "" : `no table was saved: ${text}`);
  };
  return (
    <Section
      name="curves"
      title="Curves"
      note={told || hint(range)}
      tools={
        <>
          {all.length > FIRST_SHOWN && <Search {...{ wanted, setWanted }} />}
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
      <div class="hm-groups" ref={body}>
        {groups.length === 0 && <p class="hm-note">no metric has a matching name</p>}
        {groups.map((group) => (
          <Charts
            key={`${group.title} ${wanted !== ""}`}
            {...{ store, theme, ask, options, range, group, pinned, pin, widthPx, syncKey }}
            look={setRange}
            rows={props}
            charts={charts.current}
            isAlone={groups.length === 1 && group.title === OTHERS}
            isSearched={wanted !== ""}
          />
        ))}
      </div>
    </Section>
  );
}

/** Metrics that the user pinned, in this gang or in an earlier one. */
function usePinned(): [ReadonlySet<string>, (name: string) => void] {
  const [pinned, setPinned] = useState(pinnedBefore);
  const toggle = (name: string) => {
    const next = new Set(pinned);
    if (!next.delete(name)) next.add(name);
    rememberPinned(name, next.has(name));
    setPinned(next);
  };
  return [pinned, toggle];
}

interface ChartsProps
  extends Omit<ChartProps, "metric" | "whole" | "known" | "title" | "isPinned" | "pin"> {
  group: MetricGroup;
  pinned: ReadonlySet<string>;
  pin: (name: string) => void;
  /** Where the section finds the charts for its picture. */
  charts: Map<string, Drawn>;
  /** Without a caption: there is no other group. */
  isAlone: boolean;
  isSearched: boolean;
}

/** The charts of one group beside each other; all share steps and crosshair. */
function Charts({ group, isAlone, isSearched, ...common }: ChartsProps) {
  const { title, names } = group;
  const [isFolded, toggle] = useFolded(`curves/${title}`, group.isFoldedAtFirst);
  const [isWhole, showAll] = useState(false);
  const body = useId();
  const folded = isFolded && !isAlone && !isSearched;
  const shown = isWhole ? names : names.slice(0, isSearched ? MOST_FOUND : FIRST_SHOWN);
  // groups are aligned in the same columns
  const n_columns = columnsFor(common.widthPx, isAlone ? shown.length : common.store.metrics.size);
  const label = `${title} (${names.length})`;
  return (
    <div class="hm-group">
      {!isAlone && !isSearched && (
        <div class="hm-group-caption">
          <FoldButton {...{ title: label, folded, toggle, body }} />
        </div>
      )}
      <div
        id={body}
        class="hm-charts"
        hidden={folded}
        style={{ gridTemplateColumns: `repeat(${n_columns}, minmax(0, 1fr))` }}
      >
        {!folded && common.widthPx > 0 && (
          <Shown {...common} {...{ title, names: shown, n_columns }} />
        )}
      </div>
      {!folded && shown.length < names.length && (
        <Button act={() => showAll(true)}>{`Show all ${names.length}`}</Button>
      )}
    </div>
  );
}

interface ShownProps extends Omit<ChartsProps, "group" | "isAlone" | "isSearched"> {
  title: string;
  names: readonly string[];
  n_columns: number;
}

function Shown({ title, names, n_columns, charts, pinned, pin, ...common }: ShownProps) {
  const all = [...common.store.metrics.values()];
  const whole = wholeOf(all);
  const widthPx = Math.floor((common.widthPx - GAP_PX * (n_columns - 1)) / n_columns);
  const own = names.map((name) => nameIn(title, name));
  const short = shortNames(own, Math.max(10, Math.floor((widthPx - VALUE_PX) / LETTER_PX)));
  const known = (name: string, drawn: Drawn | null) => {
    if (drawn === null) charts.delete(name);
    else charts.set(name, drawn);
  };
  return names.map((name, k) => {
    const metric = common.store.metrics.get(name);
    return metric === undefined ? null : (
      <Chart
        key={name}
        {...{ ...common, metric, whole, widthPx, known }}
        title={short[k] ?? name}
        isPinned={pinned.has(name)}
        pin={() => pin(name)}
      />
    );
  });
}

const hint = (range: Range | null) =>
  range === null
    ? "by step; drag to zoom"
    : `steps ${Math.ceil(range[0])}–${Math.floor(range[1])}; shift+drag moves, double-click shows all`;
