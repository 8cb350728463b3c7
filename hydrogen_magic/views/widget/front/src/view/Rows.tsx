import { count, counted, rate, roughly } from "../format";
import type { Gang, Rows } from "../protocol";
import { Shape } from "./shapes";

interface Props {
  gang: Gang;
  rows: Rows;
  isLive: boolean;
}

/** The progress of all ranks together with a frame: one bar, and the main numbers. */
export function RowsDone({ gang, rows, isLive }: Props) {
  const share = shareOf(rows);
  return (
    <div class="hm-rows" data-state={gang.state}>
      <Whole rows={rows} share={share} isLive={isLive} />
      <div class="hm-rows-figures">
        {share !== null && <b class="hm-percent">{percent(share)}</b>}
        {areRowsTold(rows) && <span>{doneText(rows)}</span>}
        {rows.per_s !== null && <span>{rate(rows.per_s)} rows/s</span>}
        {rows.tasks && <span class="hm-quiet">{tasksText(...rows.tasks)}</span>}
        {rows.in_flight > 0 && (
          <span class="hm-quiet">{counted(rows.in_flight, "chunk")} in flight</span>
        )}
        {rows.failed > 0 && <Failed n={rows.failed} />}
        {isLive && gang.remaining_s !== null && (
          <b class="hm-left">~{roughly(gang.remaining_s)} left</b>
        )}
      </div>
    </div>
  );
}

/** null if the number is unknown. */
function shareOf({ done, total, tasks }: Rows): number | null {
  if (total !== null) return total > 0 ? Math.min(1, done / total) : 1;
  return tasks && tasks[1] > 0 ? tasks[0] / tasks[1] : null;
}

/** Spark may report only its tasks. */
const areRowsTold = ({ done, tasks }: Rows): boolean => done > 0 || tasks === null;

/** Full only when everything is done. */
const percent = (share: number): string => `${Math.floor(share * 100)} %`;

const tasksText = (done: number, total: number): string =>
  `${count(done)} of ${counted(total, "task")}`;

function doneText({ done, total, is_estimate }: Rows): string {
  if (total === null || total === done) return counted(done, "row");
  return `${count(done)} of ${is_estimate ? "about " : ""}${counted(total, "row")}`;
}

function Whole({ rows, share, isLive }: { rows: Rows; share: number | null; isLive: boolean }) {
  if (share === null) {
    return isLive ? (
      <div class="hm-track" data-busy="true" role="progressbar" aria-label="rows" />
    ) : null;
  }
  return (
    <div
      class="hm-track"
      role="progressbar"
      aria-label="rows of the DataFrame"
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.floor(share * 100)}
      aria-valuetext={doneText(rows)}
    >
      <div class="hm-fill" style={{ width: `${(share * 100).toFixed(2)}%` }} />
    </div>
  );
}

function Failed({ n }: { n: number }) {
  return (
    <span class="hm-marked hm-error" title="predict failed for these rows; they have no prediction">
      <Shape name="cross" />
      {counted(n, "row")} failed
    </span>
  );
}
