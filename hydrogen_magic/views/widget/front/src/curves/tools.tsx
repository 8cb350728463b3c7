import { Group } from "../view/Group";
import type { Mode, Options } from "./shape";

const MODES: readonly [Mode, string][] = [
  ["mean", "mean"],
  ["ranks", "ranks"],
  ["both", "both"],
];

interface ToolsProps {
  options: Options;
  /** False for a gang of one: then there is nothing to choose between. */
  hasRanks: boolean;
  change: (options: Options) => void;
  isZoomed: boolean;
  reset: () => void;
  savePng: () => void;
  saveCsv: () => void;
}

export function Tools({ options, hasRanks, change, isZoomed, reset, ...files }: ToolsProps) {
  const { mode, smoothing, isLog } = options;
  return (
    <>
      {isZoomed && (
        <button type="button" class="hm-button" onClick={reset}>
          All steps
        </button>
      )}
      <label class="hm-smooth" title="exponential moving average">
        smooth
        <input
          type="range"
          min="0"
          max="0.99"
          step="0.01"
          value={smoothing}
          onInput={(event) => change({ ...options, smoothing: Number(event.currentTarget.value) })}
        />
        <output>{smoothing > 0 ? smoothing.toFixed(2) : "off"}</output>
      </label>
      {hasRanks && (
        <Group class="hm-choice" label="lines">
          {MODES.map(([value, word]) => (
            <button
              key={value}
              type="button"
              class="hm-button"
              aria-pressed={mode === value}
              onClick={() => change({ ...options, mode: value })}
            >
              {word}
            </button>
          ))}
        </Group>
      )}
      <button
        type="button"
        class="hm-button"
        aria-pressed={isLog}
        onClick={() => change({ ...options, isLog: !isLog })}
      >
        log
      </button>
      <button type="button" class="hm-button" onClick={files.savePng}>
        PNG
      </button>
      <button type="button" class="hm-button" onClick={files.saveCsv}>
        CSV
      </button>
    </>
  );
}

interface ChooserProps {
  names: readonly string[];
  shown: readonly string[];
  choose: (names: ReadonlySet<string>) => void;
}

/** Which metrics have a chart. */
export function Chooser({ names, shown, choose }: ChooserProps) {
  const toggle = (name: string) => {
    const next = new Set(shown);
    if (!next.delete(name)) next.add(name);
    choose(next);
  };
  return (
    <details class="hm-chooser">
      <summary>{`${shown.length} of ${names.length} metrics`}</summary>
      <div class="hm-chooser-list">
        {names.map((name) => (
          <label key={name}>
            <input type="checkbox" checked={shown.includes(name)} onChange={() => toggle(name)} />
            {name}
          </label>
        ))}
      </div>
    </details>
  );
}
