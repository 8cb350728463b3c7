import { count } from "../format";
import { figure } from "../numbers";
import { colorOf, dashOf } from "../theme";
import { areAlike, type firstBad, isPositive } from "./shape";
import type { Metric } from "./store";
import type { RankValue, Reading } from "./values";

/** Of more ranks, the kernel sends no curves, only where values stop being finite. */
const MOST_VALUES = 21;

const stepsInWords = ([first, last]: readonly [number, number]) =>
  first === last ? `step ${count(first)}` : `steps ${count(first)}–${count(last)}`;

interface SummaryProps {
  metric: Metric;
  reading: Reading;
  isLogAsked: boolean;
}

/** At the right of a chart's caption: the current step and the mean of all ranks there. */
export function Summary({ metric, reading, isLogAsked }: SummaryProps) {
  const value = reading.mean ?? (reading.ranks.length === 1 ? reading.ranks[0]?.value : null);
  const isLinear = isLogAsked && ![...metric.series.values()].some(isPositive);
  return (
    <span class="hm-chart-now">
      {isLinear && <i title="no value is above zero">linear</i>}
      {reading.steps !== null && <span>{stepsInWords(reading.steps)}</span>}
      {value !== null && value !== undefined && (
        <output
          title={
            reading.steps === null
              ? "mean of the ranks, at the newest step that most of them have reached"
              : "mean of the ranks with a value there"
          }
        >
          {figure(value)}
        </output>
      )}
    </span>
  );
}

interface RankValuesProps {
  metric: Metric;
  reading: Reading;
  bad: ReturnType<typeof firstBad>;
}

/** Under a chart: the value of every rank at the selected step, in its colour. */
export function RankValues({ metric, reading, bad }: RankValuesProps) {
  return (
    <div class="hm-chart-values">
      {bad !== null && <Bad {...bad} />}
      <Values metric={metric} ranks={reading.ranks} />
    </div>
  );
}

function Values({ metric, ranks }: { metric: Metric; ranks: readonly RankValue[] }) {
  if (areAlike(metric)) {
    return ranks.length > 1 ? <span class="hm-chart-word">the same on all ranks</span> : null;
  }
  return ranks.slice(0, MOST_VALUES).map((value) => <Value key={value.rank} {...value} />);
}

/** Where values that are not finite begin; later ones may be finite. */
function Bad({ step, ranks }: { step: number; ranks: readonly number[] }) {
  const few = ranks.slice(0, 4).join(", ");
  const more = ranks.length > 4 ? ` and ${ranks.length - 4} more` : "";
  const word = ranks.length === 1 ? "rank" : "ranks";
  return (
    <span class="hm-chart-bad">
      <svg viewBox="0 0 10 8" aria-hidden="true">
        <path d="M0 0h10L5 8z" />
      </svg>
      {`NaN or infinite, first at step ${count(step)}, ${word} ${few}${more}`}
    </span>
  );
}

function Value({ rank, value }: RankValue) {
  return (
    <span class="hm-chart-value" title={`rank ${rank}`}>
      <svg viewBox="0 0 16 6" aria-hidden="true">
        <path d="M0 3h16" stroke={colorOf(rank)} stroke-dasharray={dashOf(rank).join(" ")} />
      </svg>
      <span class="hm-chart-word">{rank}</span>
      {figure(value)}
    </span>
  );
}
