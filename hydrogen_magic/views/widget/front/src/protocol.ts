/**
 * Messages between kernel and page; the kernel's side is `page_updates.py`, `downloads.py` and `model.py`.
 * Times are seconds since the gang was launched. Numbers that JSON cannot represent (a loss of NaN)
 * are sent as words, see `Figure`. Columns of numbers are sent as binary buffers, little-endian,
 * found by their index `at` in the message's list of buffers.
 */

/** A finite number, or the name of a non-finite one. */
export type Figure = number | "nan" | "inf" | "-inf";

export type GangWord =
  | "queued"
  | "starting"
  | "running"
  | "stopping"
  | "killing"
  | "done"
  | "failed"
  | "stopped";

export type StopReason = "user" | "timeout" | "failure" | "kernel" | "owner" | "session" | "cell";

export interface Gang {
  id: string;
  /** The user's input: the line of the magic. */
  title: string;
  np: number;
  state: GangWord;
  /** The reason in one line, set at the end. */
  reason: string;
  /** Empty unless it is stopped. */
  stop_reason: "" | StopReason;
  attempt: number;
  /** The gang continues when its kernel ends. */
  outlives: boolean;
  placement: string;
  rendezvous: string;
  /** Available and needed slots while the gang waits for them. */
  queued: [number, number] | null;
  /** How much of the closure has arrived on other machines while it is sent; otherwise empty. */
  sending: string;
  /** The end; null while it runs. */
  ended_s: number | null;
  /** Progress of predictions for a frame; null for other gangs. */
  rows: Rows | null;
  /** "epoch 3/10": the outermost bar of the slowest rank, if it has others inside; the rows show the innermost. */
  outermost: string;
  /** Estimated from progress bars; null when unknown, and for predictions. */
  remaining_s: number | null;
  /** That of the slowest running rank, since a gang is as fast as that one. */
  steps_per_s: number | null;
  notices: Notice[];
  /** Possible problems: "ranks 1 and 2 wait in all_reduce #7 for rank 0". */
  warnings: string[];
  /** Whether ranks record spans (forward, backward, ...). */
  recording: boolean;
  /** The state of the torch profiler on the ranks. */
  profiling: "" | "waiting" | "recording" | "reading";
  /** The time when the last profile was requested that was recorded; 0 if none was. */
  profiled_since_s: number;
}

/** The progress of all ranks together with the rows of a frame. */
export interface Rows {
  /** The finished part, 0 to 1; null when unknown. */
  share: number | null;
  /** "1,200 of 5,000 rows · 800 rows/s · 4.8 s left". */
  text: string;
}

export interface Notice {
  level: "info" | "warning" | "error";
  text: string;
}

export interface Bar {
  desc: string;
  n: number;
  total: number | null;
  unit: string;
  per_s: number | null;
}

/** The highlight of a row; never shown by colour alone. */
export type Mark = "" | "straggler" | "stopped" | "dead" | "waiting";

export interface Rank {
  rank: number;
  host: string;
  device: string;
  /** `waiting starting loading running finishing done failed stopped idle`. */
  phase: string;
  /** The rank's activity in words: "in all_reduce #7, 12 s", "failed: ValueError". */
  doing: string;
  bar: Bar | null;
  /** Optimizer steps so far. */
  steps: number;
  steps_per_s: number | null;
  /** Last values, by metric. */
  metrics: Record<string, Figure>;
  rss_bytes: number;
  gpu_percent: number | null;
  gpu_memory_bytes: number | null;
  mark: Mark;
  /**
   * The reason for a straggler's mark ("40 steps, median 100"), or why a large gang shows the row.
   */
  why: string;
}

/** Summary of all ranks, if there are more than have their own row (16). */
export interface RankSummary {
  /** Phase -> number of ranks. */
  counts: Record<string, number>;
  /** Phases that the buffer's bytes are indices of. */
  phases: string[];
  /** Ranks whose rows are sent: failed ones, stragglers, the slowest, and those the user chose. */
  shown: number[];
  /** Ranks that the user chose, in this page or in another one. */
  chosen: number[];
  /** Buffer: phase Uint8[np], progress in percent Uint8[np] (255: unknown), mark Uint8[np]. */
  at: number;
}

/** Indices in this list are the values of the summary's mark bytes. */
export const MARKS: readonly Mark[] = ["", "straggler", "stopped", "dead", "waiting"];

/** The rank of the series that summarises all ranks. */
export const ALL_RANKS = -1;

/**
 * The newest step of a metric that more than half of the ranks that log it have reached: at that of the one
 * rank that is ahead, the mean would be its value.
 */
export interface Tip {
  step: number;
  /** The mean of the ranks with a value at this step. */
  mean: Figure;
  /** Where the mean's line ends: the first step that most ranks have not reached, though one has. */
  end: number | null;
}

/**
 * New or changed buckets of a metric. Bucket k holds the points with k*width <= step < (k+1)*width.
 * If `width` grew since the last message, existing buckets must first be merged by floor(k * old /
 * new); both are powers of two.
 */
export interface CurveDelta {
  metric: string;
  width: number;
  /** True: existing buckets of the metric are void, since the gang has gone back to an earlier step. */
  replaces?: boolean;
  /** Missing if no rank has logged a value. */
  tip?: Tip;
  series: {
    rank: number;
    n: number;
    /** First step with a non-finite value; such values are in no bucket. */
    bad_step?: number;
  }[];
  /** Buffer: per series key, count, mean, min and max, Float64[n] each. */
  at: number;
}

/** New spans of one track of a rank. */
export interface SpanDelta {
  rank: number;
  /** `phases`, `spans`, `collectives`, `profiler`, `coordinator`, ...: lanes of a rank, drawn in order. */
  track: string;
  n: number;
  /** Number of spans that were recorded faster than they could be sent. */
  skipped: number;
  /** Buffer: start Float64[n], duration Float32[n], name Uint16[n] (index in all names), depth Uint8[n]. */
  at: number;
}

/** Rank, stream (0 stdout, 1 stderr, 2 our own note), text with at most SGR colours, time. */
export type Line = [rank: number, stream: 0 | 1 | 2, text: string, at_s: number];

/** Stacks of all threads of the ranks. */
export interface Stacks {
  /** Ranks with equal stacks; the smallest groups first. */
  groups: { ranks: number[]; text: string }[];
  /** Number of ranks whose stacks were not sent because there are too many different ones. */
  n_left_out: number;
}

/** The failure as shown at the top. */
export interface Report {
  /** Traceback with the notebook's own lines; the first line is a summary. */
  text: string;
  /** Whether the cell's own error shows the same. */
  is_raised: boolean;
}

export interface Delta {
  kind: "delta";
  /** Incremented by one; a gap means that messages were lost. */
  seq: number;
  /** True: everything that a page keeps, replacing existing data. */
  full?: boolean;
  /** Number of messages that follow at once and complete a full one; these are not full themselves. */
  parts_left?: number;
  /** True: the gang has started again, and existing stacks are of an earlier attempt. */
  restarted?: boolean;
  /** The requesting client; others ignore the message, and its `seq` does not count. */
  to?: string;
  now_s: number;
  gang?: Gang;
  /** Complete rows of the ranks that changed. */
  ranks?: Rank[];
  summary?: RankSummary;
  curves?: CurveDelta[];
  /** New entries of the table of span names. */
  names?: string[];
  /** Index of the first of `names` in the table: earlier ones may be lost. 0 if it is missing. */
  names_at?: number;
  spans?: SpanDelta[];
  /** Spans before this time were left out: they are more than a page keeps. */
  spans_since_s?: number;
  lines?: Line[];
  /** Lines dropped before these; the ranks' files have them. */
  lines_skipped?: number;
  stacks?: Stacks;
  report?: Report;
}

/** Answer to `detail`: buckets of one metric in a range of steps, finer than existing ones. */
export interface Detail extends CurveDelta {
  kind: "detail";
  to: string;
  id: string;
  from: number;
  until: number;
}

/** Answer to every command, at once; `text` is the reason of a refusal or the result. */
export interface Ack {
  kind: "ack";
  to: string;
  id: string;
  ok: boolean;
  /** The kernel works on it, and answers once more at the end. */
  pending?: true;
  text?: string;
}

/** A file to save, in parts; the message's single buffer has its bytes. */
export interface FilePart {
  kind: "file";
  to: string;
  id: string;
  name: string;
  mime: string;
  part: number;
  parts: number;
}

export type FromKernel = Delta | Detail | Ack | FilePart;

export type Command =
  /** A page is ready: send it everything. */
  | { do: "hello" }
  | { do: "stop" }
  | { do: "kill" }
  | { do: "stacks" }
  | { do: "profile"; steps: number }
  | { do: "record"; on: boolean }
  | { do: "detail"; metric: string; from: number; until: number; buckets: number }
  /** Show the rows and curves of these ranks in all pages, in place of those chosen before. */
  | { do: "rows"; ranks: number[] }
  /** Send the spans of these ranks too; those of the first 16 are always sent. */
  | { do: "tracks"; ranks: number[] }
  | { do: "csv" }
  | { do: "trace" }
  /** A rank's whole output; null: all ranks, one after the other. */
  | { do: "log"; rank: number | null };

/** A command as sent: repeated with the same id until it is acknowledged. */
export type Sent = Command & { id: string; client: string };

/** State in the widget's model; all of it is saved with the notebook. */
export interface Traits {
  /** Id of the kernel in the server's API, for interrupts; empty if unknown. */
  kernel_id: string;
  /** True while a cell of the kernel waits for this gang. */
  blocking: boolean;
  /** Class of the element in the cell's output that contains the live view. */
  place: string;
  /**
   * How many questions to the user have ended without an answer: the gang that asked has ended, or the
   * cell was interrupted.
   */
  withdrawn: number;
}
