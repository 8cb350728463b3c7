import type { Ack, Command, Sent } from "./protocol";

/** The first command may arrive before the kernel's routing is set up, so it is repeated soon. */
const REPEAT_MS = 350;
/**
 * Number of quick repetitions: after these, the kernel is busy, and its queued copies are
 * sufficient.
 */
const N_QUICK = 4;
const SLOWER = 1.5;
/** After a flood of other messages, the next repetition is the first one that is answered. */
const MAX_REPEAT_MS = 1500;
/** About two minutes; a page without a kernel must not go on for ever. */
const N_TRIES = 80;

interface Waiting {
  sent: Sent;
  timer: ReturnType<typeof setTimeout>;
  settle: (ack: Ack) => void;
}

interface Repeat {
  n_tries: number;
  waitMs: number;
}

/** Ids that are unique among pages; `randomUUID` is missing on pages over plain http. */
export function randomId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return btoa(String.fromCharCode(...bytes)).replace(/[+/]/g, "-");
}

/**
 * Commands to the kernel, each with an id, repeated until the kernel acknowledges it. While the
 * kernel works on one, it is repeated at the lowest rate: its last answer may be lost.
 */
export class Channel {
  private readonly waiting = new Map<string, Waiting>();
  private n_asked = 0;
  /** Why no command reaches the kernel; empty while one may. */
  private lost = "";

  constructor(
    readonly client: string,
    private readonly send: (sent: Sent) => void,
  ) {}

  /** Resolves with the kernel's answer, or with `ok: false` and a text if there is none. */
  ask(command: Command): Promise<Ack> {
    this.n_asked += 1;
    const id = `${this.client}.${this.n_asked}`;
    const sent: Sent = { ...command, id, client: this.client };
    if (this.lost !== "") return Promise.resolve(failed(sent, this.lost));
    return new Promise((settle) => this.deliver(sent, { n_tries: 1, waitMs: REPEAT_MS }, settle));
  }

  /** Requests everything; null if that has already been requested. */
  hello(): Promise<Ack> | null {
    const isAsked = [...this.waiting.values()].some(({ sent }) => sent.do === "hello");
    return isAsked ? null : this.ask({ do: "hello" });
  }

  /**
   * Everything has arrived: no need to request it again, whether or not the ack is still to come.
   */
  greeted(): void {
    for (const { sent } of [...this.waiting.values()]) {
      if (sent.do === "hello") this.acked({ kind: "ack", to: this.client, id: sent.id, ok: true });
    }
  }

  acked(ack: Ack): void {
    const pending = this.waiting.get(ack.id);
    if (pending === undefined) return;
    clearTimeout(pending.timer);
    if (ack.pending) {
      const repeat = { n_tries: N_QUICK, waitMs: MAX_REPEAT_MS };
      this.wait(pending.sent, repeat, pending.settle);
      return;
    }
    this.waiting.delete(ack.id);
    pending.settle(ack);
  }

  /** The connection is closed: every command fails with `reason`, until `restore`. */
  lose(reason: string): void {
    this.lost = reason;
    for (const { sent } of [...this.waiting.values()]) this.acked(failed(sent, reason));
  }

  restore(): void {
    this.lost = "";
  }

  close(): void {
    for (const { timer } of this.waiting.values()) clearTimeout(timer);
    this.waiting.clear();
  }

  private deliver(sent: Sent, repeat: Repeat, settle: (ack: Ack) => void): void {
    this.wait(sent, repeat, settle);
    this.send(sent);
  }

  /** Waits for the answer, and delivers the command again if there is none. */
  private wait(sent: Sent, { n_tries, waitMs }: Repeat, settle: (ack: Ack) => void): void {
    const again = () => {
      if (n_tries >= N_TRIES) return this.acked(failed(sent, UNANSWERED));
      const slower = n_tries < N_QUICK ? 1 : SLOWER;
      const next = Math.min(waitMs * slower, MAX_REPEAT_MS);
      this.deliver(sent, { n_tries: n_tries + 1, waitMs: next }, settle);
    };
    this.waiting.set(sent.id, { sent, settle, timer: setTimeout(again, waitMs) });
  }
}

const UNANSWERED = "The kernel did not respond: it is busy with another cell, or has exited.";

const failed = ({ client, id }: Sent, text: string): Ack => {
  return { kind: "ack", to: client, id, ok: false, text };
};
