/**
 * What kernel and page say to each other; the kernel's side is `feed.py`, `files.py` and `model.py`.
 *
 * Times are seconds since the gang was launched. Numbers that JSON cannot hold (a loss that is NaN)
 * come as words, see `Figure`. Columns of numbers come as binary buffers, little-endian, found by
 * their index `at` in the message's list of buffers.
 */

/** A finite number, or the name of one that is not finite. */
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

export interface Gang {
  id: string;
  /** What the user typed: the magic's line. */
  title: string;
  np: number;
  state: GangWord;
  /** One line, set at the end: why. */
  reason: string;
  /** `user`, `timeout`, `failure` or `kernel` while it is being ended; else empty. */
  stop_reason: string;
  attempt: number;
  placement: string;
  rendezvous: string;
  /** Slots there are and slots needed while the gang waits for them. */
  queued: [number, number] | null;
  /** Unix time of the launch, seconds. */
  wall_time: number;
  /** When it ended; null while it runs. */
  ended_s: number | null;
  /** Of a frame that ranks predict; null where they do something else. */
  rows: Rows | null;
  /** Estimated from rows or progress bars; null when unknown. */
  remaining_s: number | null;
  /** The slowest running rank's, since a gang is as fast as that. */
  steps_per_s: number | null;
  culprit: number | null;
  notices: Notice[];
  /** What may be wrong just now: "ranks 1 and 2 wait in all_reduce #7 for rank 0". */
  warnings: string[];
  /** Whether ranks record forward, backward, ... as spans. */
  recording: boolean;
  /** What the torch profiler is doing on the ranks. */
  profiling: "" | "waiting" | "recording" | "reading";
}

/** How far all ranks together are with the rows of a frame. */
export interface Rows {
  done: number;
  /** null where only reading to the end would tell. */
  total: number | null;
  /** Whether the total is no more than what the rows so far suggest. */
  is_estimate: boolean;
  /** Since the first went out; null before any came back. */
  per_s: number | null;
  /** Chunks that ranks have in hand. */
  in_flight: number;
  /** Spark's, done and in all; null elsewhere. */
  tasks: [number, number] | null;
  /** Without a prediction, because `predict` failed. */
  failed: number;
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

/** How a row stands out; never shown by colour alone. */
export type Mark = "" | "straggler" | "stopped" | "dead" | "waiting";

export interface Rank {
  rank: number;
  host: string;
  device: string;
  pid: number | null;
  /** `waiting starting loading running finishing done failed stopped`. */
  phase: string;
  /** In words what the rank is doing: "in all_reduce #7, 12 s", "failed: ValueError". */
  doing: string;
  bar: Bar | null;
  /** Optimizer steps so far. */
  steps: number;
  steps_per_s: number | null;
  /** Last values, by metric. */
  metrics: Record<string, Figure>;
  rss_bytes: number;
  cpu_percent: number;
  gpu_percent: number | null;
  gpu_memory_bytes: number | null;
  mark: Mark;
  /** The reason for a straggler's mark ("40 steps, median 100"), or why a large gang shows the row. */
  why: string;
}

/** All ranks in short, where there are more than have a row of their own (16). */
export interface Fleet {
  /** Phase -> number of ranks. */
  counts: Record<string, number>;
  /** Phases that the buffer's bytes are indices of. */
  phases: string[];
  /** Ranks whose rows are sent: failed ones, stragglers, the slowest, and those the reader chose. */
  shown: number[];
  /** Buffer: phase Uint8[np], progress in percent Uint8[np] (255: unknown), mark Uint8[np]. */
  at: number;
}

/** Index in this list is what the fleet's mark bytes hold. */
export const MARKS: readonly Mark[] = ["", "straggler", "stopped", "dead", "waiting"];

/** The rank of the series that summarises all ranks. */
export const ALL_RANKS = -1;

/**
 * New or changed buckets of a metric. Bucket k holds the points with k*width <= step < (k+1)*width.
 * When `width` grew since the last message, buckets known so far are to be merged by
 * floor(k * old / new) first; both are powers of two.
 */
export interface CurveDelta {
  metric: string;
  width: number;
  series: {
    rank: number;
    n: number;
    /** First step whose value was not finite; such values are in no bucket. */
    bad_step?: number;
  }[];
  /** Buffer: per series key Float64[n], count Float32[n], mean, min, max Float32[n] each. */
  at: number;
}

/** New spans of one lane. */
export interface SpanDelta {
  rank: number;
  /** `phases`, `spans`, `collectives`, `profiler`, `coordinator`, ...: lanes of a rank, drawn in order. */
  track: string;
  n: number;
  /** Spans that were recorded faster than they could be sent. */
  skipped: number;
  /** Buffer: start Float64[n], duration Float32[n], name Uint16[n] (index in all names), depth Uint8[n]. */
  at: number;
}

/** Rank, stream (0 stdout, 1 stderr, 2 a note of ours), text with SGR colours at most, time. */
export type Line = [rank: number, stream: 0 | 1 | 2, text: string, at_s: number];

/** The failure, as it is shown on top. */
export interface Report {
  rank: number | null;
  /** Traceback with the notebook's own lines; the first line says what happened. */
  text: string;
  /** Whether the cell's own error shows the same. */
  is_raised: boolean;
}

export interface Delta {
  kind: "delta";
  /** Counts up by one; a gap means that something was lost. */
  seq: number;
  /** True: everything from the beginning, in place of what is known. */
  full?: boolean;
  /** The client that asked; others ignore the message, its `seq` does not count. */
  to?: string;
  now_s: number;
  gang?: Gang;
  /** Whole rows, of those ranks that changed. */
  ranks?: Rank[];
  fleet?: Fleet;
  curves?: CurveDelta[];
  /** Appended to the table of span names. */
  names?: string[];
  spans?: SpanDelta[];
  lines?: Line[];
  /** Lines left out before these; the ranks' files have them. */
  lines_skipped?: number;
  /** Rank -> where every thread of it is. */
  stacks?: Record<string, string>;
  report?: Report;
}

/** Answer to `detail`: buckets of one metric in a range of steps, finer than what is known. */
export interface Detail extends CurveDelta {
  kind: "detail";
  to: string;
  id: string;
  from: number;
  until: number;
}

/** Answer to every command, at once; `text` says why it was refused or what comes of it. */
export interface Ack {
  kind: "ack";
  to: string;
  id: string;
  ok: boolean;
  text?: string;
}

/** A file to save, in parts; its bytes are the message's one buffer. */
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

export type Order =
  /** I am here: send me everything. */
  | { do: "hello" }
  | { do: "stop" }
  | { do: "kill" }
  | { do: "stacks" }
  | { do: "profile"; steps: number }
  | { do: "record"; on: boolean }
  | { do: "detail"; metric: string; from: number; until: number; buckets: number }
  | { do: "rows"; ranks: number[] }
  /** Send the spans of these ranks too; large gangs start with those of the first 16. */
  | { do: "lanes"; ranks: number[] }
  /** Display again what was lost: the output itself, or what it should show. */
  | { do: "show"; what: "output" | "content" }
  | { do: "csv" }
  | { do: "trace" }
  /** A rank's whole output; null: all ranks, one after the other. */
  | { do: "log"; rank: number | null };

/** An order as sent: repeated with the same id until it is acknowledged. */
export type Sent = Order & { id: string; client: string };

/** What the kernel keeps in the widget's model; all of it is saved with the notebook. */
export interface Traits {
  gang_id: string;
  /** Name of the kernel in the server's API, empty when unknown: whom to interrupt. */
  kernel_id: string;
  /** True while a cell of the kernel waits for this gang. */
  blocking: boolean;
  /** Class of the element in the cell's output that the live view is put into. */
  place: string;
  /** Session of the client that sent the cell; empty when unknown. */
  session: string;
}
