import type { Interrupted } from "./interrupt";
import type { Ask } from "./view/props";

/** A command without an answer by then is sent to the server as an interrupt. */
const ESCALATE_MS = 1200;
/** Pause between two interrupts: signals that come at once are one. */
const AGAIN_MS = 500;
/** How long ranks have before the user may kill them. */
const OFFER_KILL_MS = 2000;

export const BY_HAND =
  "The kernel cannot receive requests from this page while its cell runs: press the cell's stop button.";
export const BUSY =
  "The kernel is busy with another cell: this gang stops when that cell ends or is interrupted.";
export const REFUSED =
  "Neither the kernel nor the notebook server accepted the request: press the cell's stop button.";

interface Ways {
  ask: Ask;
  /** Interrupts the kernel through the notebook's server. */
  interrupt: () => Promise<Interrupted>;
  /** Whether a cell waits for the gang: only then an interrupt ends this gang and nothing else. */
  isBlocking: () => boolean;
  changed: () => void;
}

/** From the click on Stop to the end of the gang. */
export class Stopping {
  /** Set at the first click, so that the page reacts at once. */
  isAsked = false;
  isKilling = false;
  /** Advice for the user; empty if all goes well. */
  hint = "";
  private isKillDue = false;
  /** Of the interrupts that the kernel counts, the first stops the gang and the second kills it. */
  private interrupts = 0;
  private round = 0;
  private readonly timers = new Set<ReturnType<typeof setTimeout>>();

  constructor(private readonly ways: Ways) {}

  stop(): void {
    if (this.isAsked) return;
    this.isAsked = true;
    this.offerKillSoon();
    this.send("stop");
  }

  kill(): void {
    if (this.isKilling) return;
    this.isAsked = this.isKilling = true;
    this.send("kill");
  }

  get isKillOffered(): boolean {
    return this.isKillDue && !this.isKilling;
  }

  /** Called when the gang is stopped by other means (another page, Ctrl-C, a timeout). */
  seen(): void {
    if (!this.isAsked && !this.isKillDue && this.timers.size === 0) this.offerKillSoon();
  }

  /** Called while the gang is not stopped: what `seen` saw is over, such as an attempt that failed. */
  passed(): void {
    if (this.isAsked) return;
    this.close();
    this.isKillDue = false;
  }

  /** Resets the state: the gang ended, or its kernel. */
  reset(): void {
    this.close();
    this.isAsked = this.isKilling = this.isKillDue = false;
    this.interrupts = 0;
    this.hint = "";
  }

  close(): void {
    for (const timer of this.timers) clearTimeout(timer);
    this.timers.clear();
    this.round += 1; // later answers refer to an earlier state
  }

  private send(word: "stop" | "kill"): void {
    this.hint = "";
    const { round } = this;
    let timer = this.later(ESCALATE_MS, () => void escalate());
    const escalate = async () => {
      const hint = this.ways.isBlocking() ? await this.interrupt() : BUSY;
      if (round !== this.round) return;
      this.hint = hint;
      this.ways.changed();
      if (hint !== "") return;
      this.interrupts += 1;
      if (word === "kill" && this.interrupts < 2)
        timer = this.later(AGAIN_MS, () => void escalate());
    };
    void this.ways.ask({ do: word }).then((ack) => {
      clearTimeout(timer);
      this.timers.delete(timer);
      if (round !== this.round) return;
      this.hint = ack.ok ? "" : (ack.text ?? "");
      if (!ack.ok) this.isAsked = this.isKilling = false; // a new request is possible
      this.ways.changed();
    });
    this.ways.changed();
  }

  private async interrupt(): Promise<string> {
    const came = await this.ways.interrupt();
    return came === "done" ? "" : came === "refused" ? REFUSED : BY_HAND;
  }

  private offerKillSoon(): void {
    this.later(OFFER_KILL_MS, () => {
      this.isKillDue = true;
      this.ways.changed();
    });
  }

  private later(delayMs: number, act: () => void): ReturnType<typeof setTimeout> {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      act();
    }, delayMs);
    this.timers.add(timer);
    return timer;
  }
}
