import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { counted } from "../format";
import { lapse } from "../numbers";
import { middle, type Range } from "../range";
import type { TimelineProps } from "../view/props";
import { Section } from "../view/Section";
import { useWidth } from "../view/useWidth";
import { Canvas } from "./Canvas";
import { NameColors } from "./colors";
import { summary } from "./hit";
import { layout } from "./layout";
import { free, type Look, rangeOf, zoomed } from "./look";
import { gangShares } from "./shares";
import { type Lane, PHASES, type SpanStore } from "./store";
import { Tools } from "./tools";
import { useShares } from "./useShares";
import { Legend, most, Where } from "./where";

/** Ranks with lanes on one page; others are on further pages. */
export const RANKS_PER_PAGE = 16;
const BUTTON_FACTOR = 0.5;

export function Timeline(props: TimelineProps) {
  const { store } = props;
  const lanes = store.lanes();
  return lanes.length === 0 ? null : <Lanes {...props} all={lanes} />;
}

const range = (n: number) => Array.from({ length: n }, (_, k) => k);

const toggled = <T,>(set: ReadonlySet<T>, item: T): ReadonlySet<T> => {
  const next = new Set(set);
  if (!next.delete(item)) next.add(item);
  return next;
};

function Lanes(props: TimelineProps & { all: readonly Lane[] }) {
  const { store, theme, all, isLive } = props;
  const [look, setLook] = useState<Look>({ kind: "whole" });
  const { page, profiled } = store;
  const [, setTurned] = useState(page);
  const [folded, setFolded] = useState<ReadonlySet<number>>(new Set());
  const [hidden, setHidden] = useState<ReadonlySet<string>>(new Set());
  const marked = useMarked();
  const [refusal, setRefusal] = useState("");
  const [widthPx, body] = useWidth();
  const colors = useMemo(() => new NameColors(), [store]);
  const ranks = props.isPaged ? range(props.np) : [...new Set(all.map((lane) => lane.rank))];
  const turnTo = (page: number) => {
    store.page = page;
    setTurned(page);
    const asked = ranks.slice(page * RANKS_PER_PAGE, (page + 1) * RANKS_PER_PAGE);
    if (props.isPaged) void props.ask({ do: "tracks", ranks: asked });
  };
  const paged = ranks.slice(page * RANKS_PER_PAGE, (page + 1) * RANKS_PER_PAGE);
  const lanes = all.filter((lane) => paged.includes(lane.rank));
  const endS = () => Math.max(store.endS, isLive ? props.nowS() : 0);
  const shares = useShares(store, lanes, () => rangeOf(look, endS()));
  const gang = gangShares(shares);
  const { highlight } = marked;
  const lookOfProfile = useRef<Look | null>(null);
  const lookAtProfile = () => {
    if (profiled === null) return;
    lookOfProfile.current = free(withMargin(profiled), endS());
    setLook(lookOfProfile.current);
  };
  useNewProfile(store.profiledSinceS, profiled, look === lookOfProfile.current, lookAtProfile);
  const zoomBy = (factor: number) =>
    setLook(zoomed(look, middle(rangeOf(look, endS())), factor, endS(), isLive));
  const saveTrace = async () => {
    const { ok, text } = await props.ask({ do: "trace" });
    setRefusal(ok ? "" : (text ?? "the trace could not be saved"));
  };
  const tools = {
    tracks: [...new Set(all.filter((l) => l.track !== PHASES).map((l) => l.track))],
    hidden,
    toggle: (track: string) => setHidden(toggled(hidden, track)),
    ranks,
    page,
    perPage: RANKS_PER_PAGE,
    setPage: turnTo,
    zoom: (isIn: boolean) => zoomBy(isIn ? BUTTON_FACTOR : 1 / BUTTON_FACTOR),
    look,
    whole: () => setLook({ kind: "whole" }),
    profiled: profiled && lookAtProfile,
    follow: isLive ? () => setLook(following(look, endS())) : null,
    save: saveTrace,
  };
  return (
    <Section
      name="timeline"
      title="Timeline"
      note={refusal || noteOf(store, profiled, look, isLive)}
      tools={<Tools {...tools} />}
      isFoldedAtFirst={all.every((lane) => lane.track === PHASES)}
    >
      <div class="hm-timeline-body" ref={body}>
        <Canvas
          store={store}
          layout={layout(lanes, folded, hidden)}
          arrangement={[page, ...folded, ...hidden].join()}
          theme={theme}
          colors={colors}
          widthPx={widthPx}
          look={look}
          setLook={setLook}
          highlight={highlight}
          phaseOf={props.phaseOf}
          endS={endS}
          isLive={isLive}
          label={summary(store, lanes, most(5, gang), endS())}
          toggleRank={(rank) => setFolded(toggled(folded, rank))}
        />
        {gang.length > 0 && (
          <>
            <Legend
              {...{ ...marked, colors, theme }}
              shares={gang}
              beside={gangShares(shares, "beside")}
            />
            <Where ranks={shares} colors={colors} theme={theme} highlight={highlight} />
          </>
        )}
      </div>
    </Section>
  );
}

const MARGIN = 0.05;

const withMargin = ([from, until]: Range): Range => {
  const margin = MARGIN * (until - from);
  return [from - margin, until + margin];
};

/**
 * Shows the profiled steps when they arrive: on the scale of the whole run they are a dot. Later
 * spans of the same profile, such as those of ranks on another page, move the view only if it still
 * shows these steps.
 */
function useNewProfile(
  sinceS: number,
  profiled: Range | null,
  isShown: boolean,
  show: () => void,
): void {
  const [from, until] = profiled ?? [null, null];
  const knownSinceS = useRef(profiled && sinceS);
  useEffect(() => {
    if (from === null) return;
    if (isShown || knownSinceS.current !== sinceS) show();
    knownSinceS.current = sinceS;
  }, [sinceS, from, until]);
}

/** The highlighted name: the one under the pointer, otherwise the one that was clicked on. */
function useMarked() {
  const [hovered, hover] = useState<string | null>(null);
  const [pinned, pin] = useState<string | null>(null);
  return { highlight: hovered ?? pinned, hover, pinned, pin };
}

/** Width of the range when following starts: the visible one, or ten seconds if all was visible. */
function following(look: Look, endS: number): Look {
  const [from, until] = rangeOf(look, endS);
  return {
    kind: "live",
    widthS: look.kind === "whole" ? Math.min(10, until - from) : until - from,
  };
}

const isWithin = (inner: Range, outer: Range) => inner[0] >= outer[0] && inner[1] <= outer[1];

function noteOf(store: SpanStore, profiled: Range | null, look: Look, isLive: boolean): string {
  const parts = [counted(store.n, "span")];
  if (profiled && look.kind === "free" && isWithin(profiled, look.range)) {
    parts.push("the profiled steps");
  }
  if (isLive && look.kind === "live") parts.push(`following the last ${lapse(look.widthS)}`);
  if (store.skipped > 0)
    parts.push(`${counted(store.skipped, "span")} dropped: too many came at once`);
  if (store.completeSinceS > 0)
    parts.push(`single spans since ${lapse(store.completeSinceS)}; the trace has all`);
  return parts.join(" · ");
}
