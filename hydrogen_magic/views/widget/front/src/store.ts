import { CurveStore } from "./curves/store";
import type { Delta, Detail, Gang, Line, Rank, RankSummary, Report, Stacks } from "./protocol";
import { SpanStore } from "./timeline/store";

/** Number of lines kept in the page; the ranks' files have the complete output. */
export const MAX_LINES = 5000;
/**
 * Number of lines over the limit before the oldest are removed, so that not every line moves all.
 */
const SLACK_LINES = 500;

/** The summary with its columns: one byte per rank each. */
export interface RankSummaryView extends RankSummary {
  /** Index in `phases`. */
  phase: Uint8Array;
  /** Percent; 255 if unknown. */
  progress: Uint8Array;
  /** Index in `MARKS`. */
  mark: Uint8Array;
}

export type Buffers = readonly DataView[];

/** Properties of the message found by `apply`. */
export type Applied = "applied" | "ignored" | "gap";

const isOver = (word: string) => word === "done" || word === "failed" || word === "stopped";

/**
 * Mirror of the kernel's data of one gang. It outlives the views that show it, so a view that is
 * created again shows everything at once. After a gap, later messages are still applied: if no
 * command reaches the kernel (VS Code while a cell runs), lost data cannot be requested, and most
 * of the view is still correct.
 */
export class Store {
  readonly curves = new CurveStore();
  readonly spans = new SpanStore();
  gang: Gang | null = null;
  readonly ranks = new Map<number, Rank>();
  summary: RankSummaryView | null = null;
  lines: Line[] = [];
  /** Number of lines before `lines[0]`: removed here, or never sent. */
  linesBefore = 0;
  stacks: Stacks | null = null;
  /** Whether the stacks were requested since this page opened, and not shown yet. */
  areStacksNew = false;
  report: Report | null = null;
  /** Incremented by every change; components compare it. */
  version = 0;
  /** Whether any message of a kernel arrived: otherwise only the final picture can be shown. */
  hasData = false;
  /** The page's clock, in milliseconds, at the last message, and at the last one with a time. */
  heardAtMs = 0;
  private timedAtMs = 0;
  private nowAtMessageS = 0;
  /** The time that is shown until the next message; null while the clock runs. */
  private heldAtS: number | null = null;
  /** The ranks whose rows and curves the kernel sends in addition; the user may have chosen others since. */
  private sentChosen: readonly number[] = [];
  private seq: number | null = null;
  /** Number of messages that the last full one still lacks. */
  partsLeft = 0;
  private readonly listeners = new Set<() => void>();
  private isFrameAsked = false;

  constructor(
    private readonly client: string,
    private readonly clockMs: () => number = () => performance.now(),
    private readonly frame: (paint: () => void) => void = requestAnimationFrame.bind(globalThis),
  ) {}

  /** Calls back at most once per animation frame; the return value unsubscribes. */
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  get isOver(): boolean {
    return this.gang !== null && isOver(this.gang.state);
  }

  /** Seconds since the launch, also between messages; constant once the gang has ended or is lost. */
  readonly nowS = (): number => {
    const still = this.gang?.ended_s ?? this.heldAtS;
    if (still !== null) return still;
    return this.nowAtMessageS + Math.max(0, this.clockMs() - this.timedAtMs) / 1000;
  };

  /** The current phase of a rank; empty if unknown. */
  phaseOf(rank: number): string {
    const { summary } = this;
    if (summary) return summary.phases[summary.phase[rank] ?? -1] ?? "";
    return this.ranks.get(rank)?.phase ?? "";
  }

  /** Seconds since the last message of the kernel. */
  silenceS(): number {
    return this.hasData ? (this.clockMs() - this.heardAtMs) / 1000 : 0;
  }

  /** The kernel has sent something, be it a part of a file. */
  heard(): void {
    this.heardAtMs = this.clockMs();
  }

  apply(delta: Delta, buffers: Buffers): Applied {
    this.heard();
    if (delta.to !== undefined && delta.to !== this.client) return "ignored";
    const isPart = !delta.full && delta.parts_left !== undefined;
    if (!delta.full && !isPart && this.seq !== null && delta.seq <= this.seq) return "ignored";
    const isNext = isPart
      ? delta.parts_left === this.partsLeft - 1
      : this.partsLeft === 0 && (this.seq === null || delta.seq === this.seq + 1);
    const isGap = !delta.full && !isNext;
    if (delta.full) this.clear();
    this.seq = delta.seq;
    this.partsLeft = delta.parts_left ?? 0;
    this.take(delta, buffers);
    this.changed();
    return isGap ? "gap" : "applied";
  }

  /** The gang ended without a message of its kernel, for `reason`; a later message replaces this. */
  endNow(reason: string): void {
    if (this.gang === null || this.isOver) return;
    for (const [place, rank] of this.ranks) {
      if (!isOver(rank.phase))
        this.ranks.set(place, { ...rank, phase: "stopped", doing: "", mark: "" });
    }
    if (this.summary) {
      const phases = [...this.summary.phases, "stopped"];
      const phase = this.summary.phase.map((k) =>
        isOver(phases[k] ?? "") ? k : phases.length - 1,
      );
      const counts: Record<string, number> = {};
      for (const k of phase) counts[phases[k] ?? ""] = (counts[phases[k] ?? ""] ?? 0) + 1;
      this.summary = { ...this.summary, phases, phase, counts };
    }
    this.gang = {
      ...this.gang,
      state: "stopped",
      reason,
      ended_s: this.nowS(),
      rows: this.gang.rows && { ...this.gang.rows, text: "" }, // it tells the time left
      steps_per_s: null,
      outermost: "",
      remaining_s: null,
      sending: "",
      queued: null,
      profiling: "",
      warnings: [],
    };
    this.changed();
  }

  /** The page gets no more messages, and does not know when the gang ends. */
  holdClock(): void {
    this.heldAtS = this.nowS();
  }

  applyDetail(detail: Detail, buffers: Buffers): void {
    if (detail.to !== this.client) return;
    this.curves.applyDetail(detail, buffers);
    this.changed();
  }

  /** Makes all subscribers repaint at the next frame. */
  changed(): void {
    this.version += 1;
    if (this.isFrameAsked) return;
    this.isFrameAsked = true;
    this.frame(() => {
      this.isFrameAsked = false;
      for (const listener of [...this.listeners]) listener();
    });
  }

  private clear(): void {
    this.curves.clear();
    this.spans.clear();
    this.ranks.clear();
    this.gang = this.summary = this.stacks = this.report = null;
    this.sentChosen = [];
    this.lines = [];
    this.linesBefore = 0;
  }

  private take(delta: Delta, buffers: Buffers): void {
    this.hasData = true;
    this.nowAtMessageS = delta.now_s;
    this.timedAtMs = this.clockMs();
    this.heldAtS = null;
    if (delta.restarted) this.stacks = null;
    if (delta.gang) {
      this.gang = delta.gang;
      this.spans.profiledSinceS = delta.gang.profiled_since_s;
    }
    for (const rank of delta.ranks ?? []) this.ranks.set(rank.rank, rank);
    if (delta.summary) this.takeSummary(readSummary(delta.summary, buffers));
    if (delta.curves) this.curves.apply(delta.curves, buffers);
    if (delta.names || delta.spans) {
      this.spans.apply(delta.names ?? [], delta.spans ?? [], buffers, delta.names_at);
    }
    this.spans.lacksBefore(delta.spans_since_s ?? 0);
    this.takeLines(delta);
    if (delta.stacks) {
      this.stacks = delta.stacks;
      this.areStacksNew = !delta.full;
    }
    if (delta.report) this.report = delta.report;
  }

  /** Rows and curves that are no longer sent would become outdated. */
  private takeSummary(summary: RankSummaryView): void {
    const left = this.sentChosen.filter((rank) => !summary.chosen.includes(rank));
    this.sentChosen = summary.chosen;
    this.summary = summary;
    const isFollowed = (rank: number) => rank === 0 || this.phaseOf(rank) === "failed";
    this.curves.drop(left.filter((rank) => !isFollowed(rank)));
    const shown = new Set(summary.shown);
    for (const rank of [...this.ranks.keys()]) if (!shown.has(rank)) this.ranks.delete(rank);
  }

  private takeLines(delta: Delta): void {
    this.linesBefore += delta.lines_skipped ?? 0;
    if (!delta.lines?.length) return;
    this.lines.push(...delta.lines);
    if (this.lines.length <= MAX_LINES + SLACK_LINES) return;
    const n_over = this.lines.length - MAX_LINES;
    this.lines.splice(0, n_over);
    this.linesBefore += n_over;
  }
}

function readSummary(summary: RankSummary, buffers: Buffers): RankSummaryView {
  const view = buffers[summary.at];
  if (view === undefined) throw new RangeError(`summary: there is no buffer ${summary.at}`);
  const np = view.byteLength / 3;
  const column = (k: number) => new Uint8Array(view.buffer, view.byteOffset + k * np, np);
  return { ...summary, phase: column(0), progress: column(1), mark: column(2) };
}
