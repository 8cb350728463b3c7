import type { CurveStore } from "../curves/store";
import type { Ack, Order, Rank } from "../protocol";
import type { Theme } from "../theme";
import type { SpanStore } from "../timeline/store";

/**
 * Gives the kernel an order; settles with the kernel's answer, however long that takes, and never
 * rejects. Files that were asked for (`csv`, `trace`, `log`) save themselves when they arrive, and
 * what `detail` brings goes to `CurveStore.applyDetail`.
 */
export type Ask = (order: Order) => Promise<Ack>;

/** What every section of the page is given. */
export interface SectionProps {
  /** The store is one object for the widget's life: this number tells that it changed. */
  version: number;
  theme: Theme;
  ask: Ask;
  np: number;
  /** False once the gang ended: nothing more will come. */
  isLive: boolean;
}

export interface CurvesProps extends SectionProps {
  store: CurveStore;
  /** Rows of ranks: their last values are what is told of the end of a curve. */
  ranks: ReadonlyMap<number, Rank>;
  /** What names of saved files begin with. */
  gangId: string;
}

export interface TimelineProps extends SectionProps {
  store: SpanStore;
  /** Seconds since the launch, going on between messages. */
  nowS: () => number;
  /** Whether the kernel sends spans of some ranks only, and more of them when it is asked. */
  isPaged: boolean;
  /** The phase that a rank is in, which has no span yet; empty while it is unknown. */
  phaseOf: (rank: number) => string;
  gangId: string;
}
