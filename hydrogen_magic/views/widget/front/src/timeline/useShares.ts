import { useEffect, useState } from "preact/hooks";
import type { Range } from "../range";
import { usePainter } from "../view/usePainter";
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
  const counter = usePainter(() => setRanks(countAll(store, lanes, range())), INTERVAL_MS);
  const [from, until] = range();
  // the inputs of the numbers
  useEffect(() => counter.ask(), [store.version, from, until, lanes.length]);
  return ranks;
}

export function countAll(store: SpanStore, lanes: readonly Lane[], range: Range): RankShares[] {
  return [...byRank(lanes)]
    .map(([rank, group]) => rankShares(store, rank, group, range))
    .filter((found) => found !== null);
}
