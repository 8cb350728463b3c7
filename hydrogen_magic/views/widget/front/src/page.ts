import { Channel, randomId } from "./channel";
import { Files, PART_PATIENCE } from "./download";
import { interruptKernel } from "./interrupt";
import type { Ack, Command, Delta, FromKernel, Traits } from "./protocol";
import { Stopping } from "./stopping";
import { Store } from "./store";
import type { Ask } from "./view/props";

/** Interval at which a page checks for missing messages. */
const CHECK_MS = 500;
/** Number of checks after which requested data has arrived, unless it was lost. */
const PATIENCE = 3;
/** The kernel sends a message every second: after this time without one, messages were lost. */
const SILENCE_S = 2.5;
/** A longer silence is a problem. */
const NO_CONTACT_S = 4;

/** The part of JupyterLab's widget manager that is used here; other front ends have none of it. */
export interface Manager {
  context?: {
    isDisposed?: boolean;
    sessionContext?: { session?: { kernel?: KernelConnection | null } | null };
  };
}

interface KernelConnection {
  /** Has the notebook run cells again although a question of the kernel has no answer. */
  removeInputGuard?(): void;
}

/** The part of anywidget's model that is used here. */
export interface Model {
  get<K extends keyof Traits>(name: K): Traits[K];
  on(event: string, callback: (...args: never[]) => void): void;
  off(event: string, callback: (...args: never[]) => void): void;
  send(content: unknown): void;
  widget_manager?: Manager;
}

const SILENT = `No message from the kernel for more than ${NO_CONTACT_S} s: it has exited, or the connection is lost.`;
const RESTARTED = "The kernel was restarted.";
const LOST_FILE =
  "The file was not saved: a part of it was lost between kernel and page. Click again to download it.";

const isForFile = ({ do: what }: Command) => what === "csv" || what === "trace" || what === "log";

/**
 * One gang in this page: its state and its channel to the kernel. There is one per widget, however
 * often and in how many places the widget is shown.
 */
export class Page {
  readonly store: Store;
  readonly channel: Channel;
  readonly stopping: Stopping;
  /** The kernel's answer to the last command of the user, if it has a text. */
  said: Pick<Ack, "ok" | "text"> | null = null;
  /** The notebook has restarted the kernel, which no longer knows this gang. */
  isKernelGone = false;
  /** Why the kernel sends no data of this gang; empty while it may still arrive. */
  refusal = "";
  /** Closes this page and its views: the notebook was closed, which removes no widget. */
  end: () => void = () => this.close();
  private readonly files = new Files();
  /** Whether everything has arrived since messages were lost. */
  private isWhole = false;
  /** Whether the parts of a full message are arriving, and none was lost so far. */
  private isArriving = false;
  /** Checks to let pass until everything is requested again. */
  private n_toWait = 0;
  private readonly timer: ReturnType<typeof setInterval>;

  constructor(
    private readonly model: Model,
    client = randomId(),
  ) {
    this.store = new Store(client);
    this.channel = new Channel(client, (sent) => model.send(sent));
    this.stopping = new Stopping({
      ask: (command) => this.channel.ask(command),
      interrupt: () => interruptKernel(model.get("kernel_id")),
      isBlocking: () => model.get("blocking"),
      changed: () => this.store.changed(),
    });
    model.on("msg:custom", this.receive);
    model.on("comm_live_update", this.disconnected);
    model.on("change:withdrawn", this.endInput);
    this.endInput(); // a question may have ended while this page was loading
    this.hello();
    this.timer = setInterval(() => this.check(), CHECK_MS);
  }

  /** Sends a command of the user; the header shows the text of the kernel's answer. */
  readonly ask: Ask = async (command) => {
    if (command.do === "detail") return this.channel.ask(command); // charts send it by themselves
    this.said = null;
    const ack = await this.channel.ask(command);
    if (ack.text) this.said = ack;
    if (ack.ok && isForFile(command)) this.files.expect(ack.id);
    this.store.changed();
    return ack;
  };

  /** Requests everything, unless that has already been requested. */
  hello(): void {
    this.n_toWait = PATIENCE;
    void this.channel.hello()?.then((ack) => {
      this.refusal = ack.ok ? "" : (ack.text ?? "");
      this.store.changed();
    });
  }

  /**
   * Requests lost data again. A server drops messages of a kernel that sends more than a thousand a
   * second, including ours, and after the last ones no other message shows the gap.
   */
  private check(): void {
    if (this.model.widget_manager?.context?.isDisposed) {
      this.end();
      return;
    }
    if (this.files.dropLost()) {
      this.said = { ok: false, text: LOST_FILE };
      this.store.changed();
    }
    this.n_toWait -= 1;
    if (this.refusal !== "" || this.isKernelGone || this.n_toWait > 0) return;
    const { store } = this;
    if (!this.isWhole || (!store.isOver && store.silenceS() > SILENCE_S)) this.hello();
  }

  /** Class of the element in the cell's output that the live view is put into. */
  get place(): string {
    return this.model.get("place");
  }

  close(): void {
    clearInterval(this.timer);
    this.model.off("msg:custom", this.receive);
    this.model.off("comm_live_update", this.disconnected);
    this.model.off("change:withdrawn", this.endInput);
    this.channel.close();
    this.stopping.close();
  }

  /** Whether the gang may run without this page knowing. */
  get isLost(): boolean {
    return !this.store.isOver && (this.isKernelGone || this.store.silenceS() > NO_CONTACT_S);
  }

  /** Why the gang cannot be reached from this page; empty if it can. */
  get unreachable(): string {
    const { id, outlives } = this.store.gang ?? { id: "", outlives: false };
    if (!this.isLost) return "";
    const why = this.isKernelGone ? RESTARTED : SILENT;
    return outlives
      ? `${why} The gang does not end with its kernel: %gang attach ${id} shows and stops it.`
      : why;
  }

  /** Whether a request to stop may have an effect: a cell that waits for its gang can be interrupted. */
  get canStop(): boolean {
    return !this.isLost || (!this.isKernelGone && this.model.get("blocking"));
  }

  private readonly disconnected = () => {
    this.isKernelGone = true;
    const { gang } = this.store;
    if (gang?.outlives) this.store.holdClock();
    else this.store.endNow(`${RESTARTED} The gang has ended with it.`);
    this.channel.lose(gang ? `${RESTARTED} %gang show ${gang.id} displays this gang.` : RESTARTED);
    this.stopping.reset();
    this.store.changed();
  };

  /**
   * JupyterLab and Notebook refuse to run a cell until the user has answered the kernel, or has interrupted
   * it by their own button. As long as the cell waits for its gang, no other code has asked.
   */
  private readonly endInput = () => {
    if (this.model.get("withdrawn") === 0 || !this.model.get("blocking")) return;
    this.model.widget_manager?.context?.sessionContext?.session?.kernel?.removeInputGuard?.();
  };

  private readonly receive = (message: FromKernel, buffers: readonly DataView[] = []) => {
    this.store.heard();
    if (message.kind === "delta") return this.takeDelta(message, buffers);
    if (message.to !== this.channel.client) return;
    if (message.kind === "ack") this.channel.acked(message);
    else if (message.kind === "detail") this.store.applyDetail(message, buffers);
    else this.files.take(message, buffers);
  };

  private takeDelta(delta: Delta, buffers: readonly DataView[]): void {
    const applied = this.store.apply(delta, buffers);
    if (applied === "ignored") return;
    this.refusal = ""; // a hello may be answered after the page gave it up
    this.channel.restore();
    if (delta.full) this.isArriving = true;
    // What the page has supposed since the kernel went is not true.
    else if (applied === "gap" || this.isKernelGone) {
      this.isWhole = this.isArriving = false;
      this.hello();
    }
    this.isKernelGone = false;
    if (this.isArriving) this.followParts();
    this.followState();
  }

  /** Everything has arrived with the last part of a full message, which may be lost. */
  private followParts(): void {
    this.isWhole = this.store.partsLeft === 0;
    this.isArriving = !this.isWhole;
    if (this.isWhole) this.channel.greeted();
    else this.n_toWait = PART_PATIENCE; // another hello would make the kernel send all again
  }

  private followState(): void {
    const word = this.store.gang?.state;
    if (word === "stopping" || word === "killing") this.stopping.seen();
    else if (this.store.isOver) this.stopping.reset();
    else this.stopping.passed();
  }
}
