import type { Manager } from "../src/page";
import type {
  Ack,
  Delta,
  FromKernel,
  Gang,
  Line,
  Rank,
  Sent,
  Stacks,
  Traits,
} from "../src/protocol";

type Callback = (...args: never[]) => void;

/** The widget's model with a kernel behind it that a test or a demonstration plays. */
export class FakeModel {
  readonly sent: Sent[] = [];
  /** What the kernel does with a command; by default nothing, as a kernel that is busy. */
  answer: (command: Sent) => void = () => {};
  widget_manager: Manager = {};
  private readonly callbacks = new Map<string, Set<Callback>>();

  constructor(readonly traits: Traits = noTraits()) {}

  get<K extends keyof Traits>(name: K): Traits[K] {
    return this.traits[name];
  }
  on(event: string, callback: Callback): void {
    this.callbacks.set(event, (this.callbacks.get(event) ?? new Set()).add(callback));
  }
  off(event: string, callback: Callback): void {
    this.callbacks.get(event)?.delete(callback);
  }
  send(content: unknown): void {
    this.sent.push(content as Sent);
    this.answer(content as Sent);
  }

  /** Has the page get a message. */
  say(message: FromKernel, buffers: readonly ArrayBuffer[] = []): void {
    const views = buffers.map((buffer) => new DataView(buffer));
    for (const callback of this.callbacks.get("msg:custom") ?? []) {
      (callback as (m: FromKernel, b: DataView[]) => void)(message, views);
    }
  }

  /** Has the page get a new value of a trait. */
  set<K extends keyof Traits>(name: K, value: Traits[K]): void {
    this.traits[name] = value;
    for (const callback of this.callbacks.get(`change:${name}`) ?? []) (callback as () => void)();
  }

  /** Ends the connection for good, as a notebook does when its kernel is restarted. */
  disconnect(): void {
    for (const callback of this.callbacks.get("comm_live_update") ?? []) (callback as () => void)();
  }

  ack(command: Sent, ok = true, text?: string): void {
    const ack: Ack = { kind: "ack", to: command.client, id: command.id, ok };
    this.say(text === undefined ? ack : { ...ack, text });
  }
}

export const noTraits = (): Traits => ({
  kernel_id: "k-1",
  blocking: true,
  place: "hm-place-0",
  withdrawn: 0,
});

export const gangWith = (changes: Partial<Gang> = {}): Gang => ({
  id: "amber-fox",
  title: "%%distributed --np 4",
  np: 4,
  state: "running",
  reason: "",
  stop_reason: "",
  attempt: 0,
  outlives: false,
  placement: "local",
  rendezvous: "torch",
  queued: null,
  sending: "",
  rows: null,
  ended_s: null,
  outermost: "",
  remaining_s: null,
  steps_per_s: null,
  notices: [],
  warnings: [],
  recording: false,
  profiling: "",
  profiled_since_s: 0,
  ...changes,
});

export const rankWith = (rank: number, changes: Partial<Rank> = {}): Rank => ({
  rank,
  host: "node-a",
  device: "cpu",
  phase: "running",
  doing: "running",
  bar: null,
  steps: 0,
  steps_per_s: null,
  metrics: {},
  rss_bytes: 0,
  gpu_percent: null,
  gpu_memory_bytes: null,
  mark: "",
  why: "",
  ...changes,
});

export const deltaWith = (seq: number, changes: Partial<Delta> = {}): Delta => ({
  kind: "delta",
  seq,
  now_s: 1,
  ...changes,
});

export const lineOf = (rank: number, text: string, stream: Line[1] = 0): Line => [
  rank,
  stream,
  text,
  1,
];

export const stacksOf = (...groups: readonly [ranks: number[], text: string][]): Stacks => ({
  groups: groups.map(([ranks, text]) => ({ ranks, text })),
  n_left_out: 0,
});

/** Columns of numbers one after the other, as the kernel packs them. */
export function packed(...columns: readonly ArrayBufferView[]): ArrayBuffer {
  const n_bytes = columns.reduce((sum, column) => sum + column.byteLength, 0);
  const all = new Uint8Array(n_bytes);
  let at = 0;
  for (const column of columns) {
    all.set(new Uint8Array(column.buffer, column.byteOffset, column.byteLength), at);
    at += column.byteLength;
  }
  return all.buffer;
}
