import type { GangWord } from "../protocol";
import { colorOf, dashOf } from "../theme";

export type Tone = "accent" | "good" | "error" | "warning" | "faint";

/** Outlines in a field of 12 x 12, so that no state is shown by its colour alone. */
const SHAPES = {
  play: "M3.5 2v8l6-4z",
  ring: "M6 2.2a3.8 3.8 0 1 1 0 7.6a3.8 3.8 0 1 1 0-7.6z",
  half: "M6 1.4a4.6 4.6 0 1 0 0 9.2a4.6 4.6 0 1 0 0-9.2zM6 2.8v6.4a3.2 3.2 0 0 0 0-6.4z",
  square: "M2.8 2.8h6.4v6.4h-6.4z",
  check: "M2.4 6.4 5 9 9.8 3.4",
  cross: "M3 3l6 6M9 3l-6 6",
  slow: "M6 2.2 10.4 9.8H1.6z",
  broken: "M2 6h2.4M7.6 6H10",
  hourglass: "M3 2h6L3 10h6z",
} as const;
export type ShapeName = keyof typeof SHAPES;

const OUTLINED: ReadonlySet<ShapeName> = new Set(["ring", "check", "cross", "broken"]);

export function Shape({ name }: { name: ShapeName }) {
  const look = OUTLINED.has(name) ? "hm-shape hm-outline" : "hm-shape";
  return (
    <svg class={look} viewBox="0 0 12 12" aria-hidden="true">
      <path d={SHAPES[name]} fill-rule="evenodd" />
    </svg>
  );
}

export const STATES: Record<GangWord | "no contact", { shape: ShapeName; tone: Tone }> = {
  queued: { shape: "ring", tone: "faint" },
  starting: { shape: "half", tone: "accent" },
  running: { shape: "play", tone: "accent" },
  stopping: { shape: "square", tone: "warning" },
  killing: { shape: "square", tone: "error" },
  done: { shape: "check", tone: "good" },
  failed: { shape: "cross", tone: "error" },
  stopped: { shape: "square", tone: "warning" },
  "no contact": { shape: "broken", tone: "warning" },
};

/** A rank's colour as in its curves, with their dash pattern. */
export function Swatch({ rank }: { rank: number }) {
  return (
    <svg class="hm-swatch" viewBox="0 0 16 4" aria-hidden="true">
      <path d="M0 2h16" stroke={colorOf(rank)} stroke-dasharray={dashOf(rank).join(" ")} />
    </svg>
  );
}

interface TrackProps {
  /** What a screen reader says; without one, the bar repeats a number beside it. */
  label?: string;
  /** 0 to 1; without one, the bar shows activity only. */
  share?: number;
  now?: number;
  max?: number;
}

/** A bar that shows progress or a proportion. */
export function Track({ label, share, now, max }: TrackProps) {
  const values =
    now === undefined ? {} : { "aria-valuemin": 0, "aria-valuemax": max, "aria-valuenow": now };
  const aria =
    label === undefined
      ? ({ "aria-hidden": "true" } as const)
      : ({ role: "progressbar", "aria-label": label } as const);
  return (
    <div
      class="hm-track"
      data-busy={share === undefined ? "true" : undefined}
      {...aria}
      {...values}
    >
      {share !== undefined && (
        <div class="hm-fill" style={{ width: `${(share * 100).toFixed(2)}%` }} />
      )}
    </div>
  );
}
