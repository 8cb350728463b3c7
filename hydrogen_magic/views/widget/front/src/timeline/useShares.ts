import { useEffect, useRef, useState } from "preact/hooks";
import { Painter } from "../painter";
import type { Range } from "../range";
import { byRank } from "./layout";
import { type RankShares, rankShares } from "./shares";
import type { Lane, SpanStore } from "./store";

/** Numbers that change faster are unreadable. */
const INTERVAL_MS = 300;

/** Time shares in the visible range, per rank; updated a few times a second. */
export function useShares(
  store: SpanStore,
  lanes: readonly Lane[],
  range: () => Range,
): RankShares[] {
  const [ranks, setRanks] = useState<RankShares[]>([]);
  const latest = useRef({ lanes, range });
  latest.current = { lanes, range };
  const counter = useRef<Painter | null>(null);
  useEffect(() => {
    const count = () => setRanks(countAll(store, latest.current.lanes, latest.current.range()));
    counter.current = new Painter(count, INTERVAL_MS);
    return () => counter.current?.end();
  }, [store]);
  const [from, until] = range();
  // the inputs of the numbers
  useEffect(() => counter.current?.ask(), [store.version, from, until, lanes.length]);
  return ranks;
}

export function countAll(store: SpanStore, lanes: readonly Lane[], range: Range): RankShares[] {
  return [...byRank(lanes)]
    .map(([rank, group]) => rankShares(store, rank, group, range))
    .filter((found) => found !== null);
}
