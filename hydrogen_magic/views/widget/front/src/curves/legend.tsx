import { count } from "../format";
import { figure } from "../numbers";
import { colorOf, dashOf, type Theme } from "../theme";
import type { firstBad } from "./shape";
import type { Metric } from "./store";
import { extremes, type RankValue, readAt } from "./values";

/** Ranks whose values are all told; of more, the lowest and the highest are. */
const MANY = 16;

const stepsInWords = ([first, last]: readonly [number, number]) =>
  first === last ? `step ${count(first)}` : `steps ${count(first)}–${count(last)}`;

interface SummaryProps {
  metric: Metric;
  /** Null while the pointer is elsewhere: then the last values are told. */
  step: number | null;
  isLogAsked: boolean;
}

/** At the right of a chart's caption: the step and the mean of all ranks there. */
export function Summary({ metric, step, isLogAsked }: SummaryProps) {
  const reading = readAt(metric, step);
  if (reading === null) return null;
  const value = reading.mean ?? (reading.ranks.length === 1 ? reading.ranks[0]?.value : null);
  const isLinear = isLogAsked && !hasPositive(metric);
  return (
    <span class="hm-chart-now">
      {isLinear && <i title="no value is above zero">linear</i>}
      {step !== null && <span>{stepsInWords(reading.steps)}</span>}
      {value !== null && value !== undefined && <output>{figure(value)}</output>}
    </span>
  );
}

const hasPositive = (metric: Metric) =>
  [...metric.series.values()].some((b) => b.maxs.subarray(0, b.n).some((value) => value > 0));

interface RankValuesProps {
  metric: Metric;
  step: number | null;
  theme: Theme;
  bad: ReturnType<typeof firstBad>;
}

/** Under a chart: what every rank has at the reader's step, in its colour. */
export function RankValues({ metric, step, theme, bad }: RankValuesProps) {
  const { ranks } = readAt(metric, step) ?? { ranks: [] };
  const isMany = ranks.length > MANY;
  return (
    <div class="hm-chart-values">
      {bad !== null && <Bad {...bad} />}
      {isMany && <Extremes ranks={ranks} theme={theme} />}
      {!isMany && ranks.length > 1 && ranks.map((v) => <Value key={v.rank} {...v} theme={theme} />)}
    </div>
  );
}

/** "not finite from step 120, rank 1" */
function Bad({ step, ranks }: { step: number; ranks: readonly number[] }) {
  const few = ranks.slice(0, 4).join(", ");
  const more = ranks.length > 4 ? ` and ${ranks.length - 4} more` : "";
  const word = ranks.length === 1 ? "rank" : "ranks";
  return (
    <span class="hm-chart-bad">
      <svg viewBox="0 0 10 8" aria-hidden="true">
        <path d="M0 0h10L5 8z" />
      </svg>
      {`NaN or infinite from step ${count(step)}, ${word} ${few}${more}`}
    </span>
  );
}

function Extremes({ ranks, theme }: { ranks: readonly RankValue[]; theme: Theme }) {
  const found = extremes(ranks);
  if (found === null) return null;
  return (
    <>
      <span class="hm-chart-word">lowest</span>
      <Value {...found[0]} theme={theme} />
      <span class="hm-chart-word">highest</span>
      <Value {...found[1]} theme={theme} />
    </>
  );
}

function Value({ rank, value, theme }: RankValue & { theme: Theme }) {
  return (
    <span class="hm-chart-value" title={`rank ${rank}`}>
      <svg viewBox="0 0 16 6" aria-hidden="true">
        <path d="M0 3h16" stroke={colorOf(theme, rank)} stroke-dasharray={dashOf(rank).join(" ")} />
      </svg>
      <span class="hm-chart-word">{rank}</span>
      {figure(value)}
    </span>
  );
}
