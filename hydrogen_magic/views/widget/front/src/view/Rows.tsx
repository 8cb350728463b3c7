import type { Gang, Rows } from "../protocol";

interface Props {
  gang: Gang;
  rows: Rows;
  isLive: boolean;
  isLost: boolean;
}

/** The progress of all ranks together with a frame: one bar, and the main numbers. */
export function RowsDone({ gang, rows: { share, text }, isLive, isLost }: Props) {
  return (
    <div class="hm-rows" data-state={gang.state}>
      {share !== null && <Whole share={share} />}
      {share === null && isLive && !isLost && (
        <div class="hm-track" data-busy="true" role="progressbar" aria-label="rows" />
      )}
      <div class="hm-rows-figures">
        {share !== null && <b class="hm-percent">{`${floored(share)} %`}</b>}
        {!isLost && <span>{text}</span>}
      </div>
    </div>
  );
}

/** Full only when everything is done; 0.29 * 100 is a little less than 29. */
const floored = (share: number): number => Math.floor(share * 100 + 1e-9);

function Whole({ share }: { share: number }) {
  return (
    <div
      class="hm-track"
      role="progressbar"
      aria-label="rows of the DataFrame"
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={floored(share)}
    >
      <div class="hm-fill" style={{ width: `${(share * 100).toFixed(2)}%` }} />
    </div>
  );
}
