import { Group } from "../view/Group";
import type { Look } from "./look";

interface ToolsProps {
  tracks: readonly string[];
  hidden: ReadonlySet<string>;
  toggle: (track: string) => void;
  ranks: readonly number[];
  page: number;
  perPage: number;
  setPage: (page: number) => void;
  zoom: (isIn: boolean) => void;
  look: Look;
  whole: () => void;
  /** Null once the gang ended: there is nothing to follow. */
  follow: (() => void) | null;
  save: () => void;
}

export function Tools(props: ToolsProps) {
  const { tracks, hidden, toggle, zoom, look, whole, follow, save } = props;
  return (
    <>
      <Pages {...props} />
      {tracks.length > 1 && (
        <Group class="hm-choice" label="tracks shown">
          {tracks.map((track) => (
            <button
              key={track}
              type="button"
              class="hm-button"
              aria-pressed={!hidden.has(track)}
              onClick={() => toggle(track)}
            >
              {track}
            </button>
          ))}
        </Group>
      )}
      <Group class="hm-choice" label="zoom">
        <button
          type="button"
          class="hm-button"
          aria-label="zoom out"
          title="Ctrl+wheel zooms, drag moves"
          onClick={() => zoom(false)}
        >
          −
        </button>
        <button
          type="button"
          class="hm-button"
          aria-label="zoom in"
          title="Ctrl+wheel zooms, drag moves"
          onClick={() => zoom(true)}
        >
          +
        </button>
        <button
          type="button"
          class="hm-button"
          aria-pressed={look.kind === "whole"}
          onClick={whole}
        >
          Fit
        </button>
        {follow && (
          <button
            type="button"
            class="hm-button"
            aria-pressed={look.kind === "live"}
            onClick={follow}
          >
            Follow
          </button>
        )}
      </Group>
      <button
        type="button"
        class="hm-button"
        title="Chrome trace, for Perfetto or chrome://tracing"
        onClick={save}
      >
        Trace
      </button>
    </>
  );
}

/** "ranks 0–15 of 64" with a way to the others. */
function Pages({ ranks, page, perPage, setPage }: ToolsProps) {
  if (ranks.length <= perPage) return null;
  const shown = ranks.slice(page * perPage, (page + 1) * perPage);
  const isLast = (page + 1) * perPage >= ranks.length;
  return (
    <Group class="hm-choice" label="ranks shown">
      <button
        type="button"
        class="hm-button"
        aria-label="ranks before"
        disabled={page === 0}
        onClick={() => setPage(page - 1)}
      >
        ‹
      </button>
      <span class="hm-note">{`ranks ${shown[0]}–${shown.at(-1)} of ${ranks.length} with lanes`}</span>
      <button
        type="button"
        class="hm-button"
        aria-label="ranks after"
        disabled={isLast}
        onClick={() => setPage(page + 1)}
      >
        ›
      </button>
    </Group>
  );
}
