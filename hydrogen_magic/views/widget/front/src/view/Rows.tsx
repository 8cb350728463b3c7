import type { Gang, Rows } from "../protocol";
import { Track } from "./shapes";

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
      {share !== null && (
        <Track label="rows of the DataFrame" share={share} now={floored(share)} max={100} />
      )}
      {share === null && isLive && !isLost && <Track label="rows" />}
      <div class="hm-rows-figures">
        {share !== null && <b class="hm-percent">{`${floored(share)} %`}</b>}
        {!isLost && <span>{text}</span>}
      </div>
    </div>
  );
}

/** Full only when everything is done; 0.29 * 100 is a little less than 29. */
const floored = (share: number): number => Math.floor(share * 100 + 1e-9);
