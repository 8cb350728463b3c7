import { useLayoutEffect, useState } from "preact/hooks";
import { count, counted } from "../format";
import { type Hit, MOST_HITS, search } from "../lines";
import type { Store } from "../store";
import { Button } from "./Button";
import { CHUNK_LINES, Chunk } from "./Chunk";
import { useFollow } from "./follow";
import type { Ask, SectionProps } from "./props";
import { Section } from "./Section";

const FEWEST_ROWS = 4;
const MOST_ROWS = 14;

/** The output of all ranks, or of one. */
export function Output({ store, ask, np, version }: SectionProps & { store: Store }) {
  const [rank, setRank] = useState<number | null>(null);
  const [wanted, setWanted] = useState("");
  const [chosen, choose] = useState<Hit | null>(null);
  const [box, setBox] = useState<HTMLElement | null>(null);
  const follow = useFollow(box, version, rank);
  const hits = search(store.lines, store.linesBefore, rank, wanted);
  const at = placeOf(chosen, hits);
  const current = hits[at];
  useShownHit(box, current, [wanted, rank, chosen], follow.letGo);
  if (store.lines.length === 0 && store.linesBefore === 0) return null;
  const step = (by: number) => choose(hits[(at + by + hits.length) % hits.length] ?? null);
  const find = (text: string) => {
    setWanted(text);
    choose(null);
  };
  const tools = (
    <>
      <Search wanted={wanted} n_hits={hits.length} at={at} find={find} step={step} />
      <RankChoice np={np} rank={rank} choose={setRank} />
      <Button isPressed={follow.isOn} act={follow.isOn ? follow.letGo : follow.resume}>
        Follow
      </Button>
      <FileButton rank={rank} ask={ask} />
    </>
  );
  return (
    <Section name="output" title="Output" note={<Note store={store} />} tools={tools}>
      <div
        class="hm-log"
        role="log"
        aria-live="off"
        aria-label="Output"
        // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reached by keyboard
        tabIndex={0}
        style={{ "--hm-rows": rowsFor(store.lines.length) }}
        ref={setBox}
      >
        {chunksOf(store).map(([first, lines]) => (
          <Chunk
            key={Math.floor(first / CHUNK_LINES)}
            first={first}
            lines={lines}
            rank={rank}
            marks={marksIn(hits, first, lines.length, current)}
            wanted={wanted}
            current={currentIn(current, first, lines.length)}
          />
        ))}
        {rank !== null && store.linesBefore > 0 && <NoLine store={store} rank={rank} />}
      </div>
    </Section>
  );
}

/** Says that a rank may have printed something before the lines that are here. */
function NoLine({ store, rank }: { store: Store; rank: number }) {
  if (store.lines.some((line) => line[0] === rank)) return null;
  return (
    <p class="hm-note">
      {`none of the last ${counted(store.lines.length, "line")} is from rank ${rank}; “Whole file” has any earlier output`}
    </p>
  );
}

function FileButton({ rank, ask }: { rank: number | null; ask: Ask }) {
  const whose = rank === null ? "all ranks" : `rank ${rank}`;
  return (
    <Button
      title={`Download the complete output of ${whose}`}
      act={() => void ask({ do: "log", rank })}
    >
      Whole file
    </Button>
  );
}

/** Grows with its first lines, then scrolls; the user may drag it to another height. */
const rowsFor = (n_lines: number) => Math.min(MOST_ROWS, Math.max(FEWEST_ROWS, n_lines));

function Note({ store }: { store: Store }) {
  const { linesBefore, lines } = store;
  const all = counted(linesBefore + lines.length, "line");
  return <>{linesBefore === 0 ? all : `${count(lines.length)} of ${all}`}</>;
}

/** The lines, split at multiples of a chunk's length: old chunks do not change. */
function chunksOf({ lines, linesBefore }: Store) {
  const chunks: [first: number, lines: Store["lines"]][] = [];
  let i = 0;
  while (i < lines.length) {
    const end = Math.min(lines.length, i + CHUNK_LINES - ((linesBefore + i) % CHUNK_LINES));
    chunks.push([linesBefore + i, lines.slice(i, end)]);
    i = end;
  }
  return chunks;
}

/** Index of the chosen hit, or of the next one if its line was removed; 0 without a choice. */
function placeOf(chosen: Hit | null, hits: readonly Hit[]): number {
  if (chosen === null) return 0;
  const { line, from } = chosen;
  const at = hits.findIndex((hit) => hit.line > line || (hit.line === line && hit.from >= from));
  return at < 0 ? Math.max(0, hits.length - 1) : at;
}

const isIn = (hit: Hit, first: number, n: number) => hit.line >= first && hit.line < first + n;

function marksIn(hits: readonly Hit[], first: number, n: number, current: Hit | undefined) {
  return hits
    .filter((hit) => isIn(hit, first, n))
    .map((hit) => ({ ...hit, isCurrent: hit === current }));
}

const currentIn = (current: Hit | undefined, first: number, n: number) =>
  current && isIn(current, first, n) ? `${current.line}:${current.from}` : "";

/**
 * Scrolls to the current search hit when the user chooses another one, not when the line of the
 * current one is removed: the user may be reading.
 */
function useShownHit(
  box: HTMLElement | null,
  current: Hit | undefined,
  choices: readonly unknown[],
  letGo: () => void,
): void {
  useLayoutEffect(() => {
    if (current === undefined) return;
    letGo();
    const line = box?.querySelector<HTMLElement>(`[data-line="${current.line}"]`);
    if (line && box) centre(box, line);
  }, [box, current === undefined, ...choices]);
}

/** Scrolls only the box: `scrollIntoView` would also move the notebook. */
function centre(box: HTMLElement, line: HTMLElement): void {
  const offset = line.getBoundingClientRect().top - box.getBoundingClientRect().top;
  box.scrollTop += offset - box.clientHeight / 2;
}

interface SearchProps {
  wanted: string;
  n_hits: number;
  at: number;
  find: (text: string) => void;
  step: (by: number) => void;
}

function Search({ wanted, n_hits, at, find, step }: SearchProps) {
  const keys = (event: KeyboardEvent) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") find("");
  };
  const all = n_hits < MOST_HITS ? count(n_hits) : `${count(n_hits)} or more`;
  const told = n_hits ? `${count(at + 1)} of ${all}` : "none";
  return (
    <span class="hm-search">
      <input
        type="search"
        class="hm-input"
        placeholder="Search"
        aria-label="Search the output; Enter goes to the next, Shift Enter to the one before"
        value={wanted}
        onInput={(event) => find(event.currentTarget.value)}
        onKeyDown={keys}
      />
      <span class="hm-note" role="status">
        {wanted ? told : ""}
      </span>
    </span>
  );
}

interface ChoiceProps {
  np: number;
  rank: number | null;
  choose: (rank: number | null) => void;
}

function RankChoice({ np, rank, choose }: ChoiceProps) {
  if (np === 1) return null;
  const ranks = Array.from({ length: np }, (_, k) => k);
  return (
    <select
      class="hm-select"
      aria-label="Rank whose output is shown"
      value={rank === null ? "" : String(rank)}
      onChange={({ currentTarget: { value } }) => choose(value === "" ? null : Number(value))}
    >
      <option value="">all ranks</option>
      {ranks.map((k) => (
        <option key={k} value={String(k)}>
          rank {k}
        </option>
      ))}
    </select>
  );
}
