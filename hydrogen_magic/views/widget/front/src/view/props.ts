import type { CurveStore } from "../curves/store";
import type { Ack, Command, Rank } from "../protocol";
import type { Theme } from "../theme";
import type { SpanStore } from "../timeline/store";

/**
 * Sends a command to the kernel; resolves with the kernel's answer, however long that takes, and
 * never rejects. Requested files (`csv`, `trace`, `log`) are saved when they arrive, and the result
 * of `detail` is passed to `CurveStore.applyDetail`.
 */
export type Ask = (command: Command) => Promise<Ack>;

/** Properties of every section of the page. */
export interface SectionProps {
  /** The store is one object for the widget's lifetime: this number changes with its contents. */
  version: number;
  theme: Theme;
  ask: Ask;
  np: number;
  /** False after the gang's end: no more data will arrive. */
  isLive: boolean;
}

export interface CurvesProps extends SectionProps {
  store: CurveStore;
  /** Rows of ranks: their last values are shown at the end of a curve. */
  ranks: ReadonlyMap<number, Rank>;
  /** Prefix of the names of saved files. */
  gangId: string;
}

export interface TimelineProps extends SectionProps {
  store: SpanStore;
  /** Seconds since the launch, also between messages. */
  nowS: () => number;
  /** Whether the kernel sends spans of some ranks only, and of others on request. */
  isPaged: boolean;
  /** The current phase of a rank, which has no span yet; empty if unknown. */
  phaseOf: (rank: number) => string;
}
