import { Button } from "../view/Button";
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
  /** Null without a profile. */
  profiled: (() => void) | null;
  /** Null after the gang's end: there is nothing to follow. */
  follow: (() => void) | null;
  save: () => void;
}

const ZOOM_HINT = "Ctrl+wheel zooms, drag moves";

export function Tools(props: ToolsProps) {
  const { tracks, hidden, toggle, save } = props;
  return (
    <>
      <Pages {...props} />
      {tracks.length > 1 && (
        <Group class="hm-choice" label="tracks shown">
          {tracks.map((track) => (
            <Button key={track} isPressed={!hidden.has(track)} act={() => toggle(track)}>
              {track}
            </Button>
          ))}
        </Group>
      )}
      <Zoom {...props} />
      <Button title="Chrome trace, for Perfetto or chrome://tracing" act={save}>
        Trace
      </Button>
    </>
  );
}

function Zoom({ zoom, look, whole, profiled, follow }: ToolsProps) {
  return (
    <Group class="hm-choice" label="zoom">
      <Button label="zoom out" title={ZOOM_HINT} act={() => zoom(false)}>
        −
      </Button>
      <Button label="zoom in" title={ZOOM_HINT} act={() => zoom(true)}>
        +
      </Button>
      <Button isPressed={look.kind === "whole"} act={whole}>
        Fit
      </Button>
      {profiled && (
        <Button title="Show the profiled steps" act={profiled}>
          Profile
        </Button>
      )}
      {follow && (
        <Button isPressed={look.kind === "live"} act={follow}>
          Follow
        </Button>
      )}
    </Group>
  );
}

/** "ranks 0–15 of 64" with buttons for the others. */
function Pages({ ranks, page, perPage, setPage }: ToolsProps) {
  if (ranks.length <= perPage) return null;
  const shown = ranks.slice(page * perPage, (page + 1) * perPage);
  const isLast = (page + 1) * perPage >= ranks.length;
  return (
    <Group class="hm-choice" label="ranks shown">
      <Button label="ranks before" isDisabled={page === 0} act={() => setPage(page - 1)}>
        ‹
      </Button>
      <span class="hm-note">{`ranks ${shown[0]}–${shown.at(-1)} of ${ranks.length}`}</span>
      <Button label="ranks after" isDisabled={isLast} act={() => setPage(page + 1)}>
        ›
      </Button>
    </Group>
  );
}
