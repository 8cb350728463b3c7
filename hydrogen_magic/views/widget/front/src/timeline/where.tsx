import { lapse, percent } from "../numbers";
import type { Theme } from "../theme";
import { Group } from "../view/Group";
import { inkOn, type NameColors } from "./colors";
import type { RankShares, Share } from "./shares";

/** Names in the legend; the bars and the picture have the others. */
const MOST_NAMES = 12;
const MOST_BESIDE = 6;
/** Narrower segments have no space for their number. */
const LEAST_TOLD = 0.06;

interface LegendProps {
  shares: readonly Share[];
  /** Names of tracks whose time is not part of the total. */
  beside: readonly Share[];
  colors: NameColors;
  theme: Theme;
  highlight: string | null;
  hover: (name: string | null) => void;
  pinned: string | null;
  pin: (name: string | null) => void;
}

/** Names by decreasing time, with their share of the visible range. */
export function Legend(props: LegendProps) {
  const { shares, beside } = props;
  const n_more = Math.max(0, shares.length - MOST_NAMES) + Math.max(0, beside.length - MOST_BESIDE);
  return (
    <Group class="hm-names" label="where the time goes, all ranks">
      {shares.slice(0, MOST_NAMES).map((share) => (
        <Name key={share.name} {...props} {...share} />
      ))}
      {beside.length > 0 && <span class="hm-note">beside</span>}
      {beside.slice(0, MOST_BESIDE).map((share) => (
        <Name key={`beside ${share.name}`} {...props} {...share} />
      ))}
      {n_more > 0 && <span class="hm-note">{`and ${n_more} more`}</span>}
    </Group>
  );
}

function Name({ name, share, colors, theme, highlight, hover, pinned, pin }: LegendProps & Share) {
  const isDim = highlight !== null && highlight !== name;
  return (
    <button
      type="button"
      class={isDim ? "hm-name hm-dim" : "hm-name"}
      aria-pressed={pinned === name}
      title={`Show ${name} alone`}
      onMouseEnter={() => hover(name)}
      onMouseLeave={() => hover(null)}
      onClick={() => pin(pinned === name ? null : name)}
    >
      <i style={{ background: colors.fill(name, theme) }} aria-hidden="true" />
      {name}
      <b>{percent(share)}</b>
    </button>
  );
}

interface WhereProps {
  ranks: readonly RankShares[];
  colors: NameColors;
  theme: Theme;
  highlight: string | null;
}

/** One bar per rank: the division of its visible time. */
export function Where({ ranks, colors, theme, highlight }: WhereProps) {
  const inOrder = (shares: readonly Share[]) =>
    [...shares].sort((a, b) => colors.indexOf(a.name) - colors.indexOf(b.name));
  return (
    <div class="hm-where">
      {ranks.map(({ rank, shares }) => (
        <div key={rank} class="hm-where-row" role="img" aria-label={inWords(rank, shares)}>
          <span>{`rank ${rank}`}</span>
          <div class="hm-where-bar">
            {inOrder(shares).map((share) => (
              <Segment
                key={share.name}
                {...share}
                fill={colors.fill(share.name, theme)}
                isDim={highlight !== null && highlight !== share.name}
              />
            ))}
          </div>
        </div>
      ))}
    </div>
  );
}

interface SegmentProps extends Share {
  fill: string;
  isDim: boolean;
}

function Segment({ name, seconds, share, fill, isDim }: SegmentProps) {
  return (
    <i
      class={isDim ? "hm-dim" : undefined}
      style={{ width: `${share * 100}%`, background: fill, color: inkOn(fill) }}
      title={`${name}: ${percent(share)} of the time from the rank's first span to its last, ${lapse(seconds)}`}
    >
      {share >= LEAST_TOLD && <b>{percent(share)}</b>}
    </i>
  );
}

const inWords = (rank: number, shares: readonly Share[]) => `rank ${rank}: ${most(4, shares)}`;

/** "backward 48 %, forward 27 %" */
export const most = (n: number, shares: readonly Share[]): string =>
  shares
    .slice(0, n)
    .map(({ name, share }) => `${name} ${percent(share)}`)
    .join(", ");
