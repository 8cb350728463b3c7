import { Button } from "../view/Button";
import { Group } from "../view/Group";
import type { Mode, Options } from "./shape";

const MODES: readonly Mode[] = ["mean", "ranks", "both"];

interface ToolsProps {
  options: Options;
  /** False for a gang of one rank: then there is nothing to choose. */
  hasRanks: boolean;
  change: (options: Options) => void;
  isZoomed: boolean;
  reset: () => void;
  savePng: () => void;
  saveCsv: () => void;
}

export function Tools({ options, hasRanks, change, isZoomed, reset, ...files }: ToolsProps) {
  const { mode, isLog } = options;
  const set = (some: Partial<Options>) => change({ ...options, ...some });
  return (
    <>
      {isZoomed && <Button act={reset}>All steps</Button>}
      <Smoothing smoothing={options.smoothing} set={(smoothing) => set({ smoothing })} />
      {hasRanks && (
        <Group class="hm-choice" label="lines">
          {MODES.map((word) => (
            <Button key={word} isPressed={mode === word} act={() => set({ mode: word })}>
              {word}
            </Button>
          ))}
        </Group>
      )}
      <Button isPressed={isLog} act={() => set({ isLog: !isLog })}>
        log
      </Button>
      <Button act={files.savePng}>PNG</Button>
      <Button act={files.saveCsv}>CSV</Button>
    </>
  );
}

function Smoothing({ smoothing, set }: { smoothing: number; set: (smoothing: number) => void }) {
  return (
    <label class="hm-smooth" title="exponential moving average">
      smooth
      <input
        type="range"
        min="0"
        max="0.99"
        step="0.01"
        value={smoothing}
        onInput={(event) => set(Number(event.currentTarget.value))}
      />
      <output>{smoothing > 0 ? smoothing.toFixed(2) : "off"}</output>
    </label>
  );
}

interface SearchProps {
  wanted: string;
  setWanted: (wanted: string) => void;
}

/** Filters the charts by names of metrics that contain the search text. */
export function Search({ wanted, setWanted }: SearchProps) {
  return (
    <input
      type="search"
      class="hm-input"
      placeholder="Find a metric"
      aria-label="Find a metric"
      value={wanted}
      onInput={(event) => setWanted(event.currentTarget.value)}
      onKeyDown={(event) => event.key === "Escape" && setWanted("")}
    />
  );
}
