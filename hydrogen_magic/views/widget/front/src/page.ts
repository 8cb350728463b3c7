import { Channel, randomId } from "./channel";
import { Files, PART_PATIENCE } from "./download";
import { interruptKernel } from "./interrupt";
import { heldBy, isClosed, isFrom, type Manager } from "./notebook";
import type { Ack, Command, Delta, FromKernel, Traits } from "./protocol";
import { Stopping } from "./stopping";
import { Store } from "./store";
import type { Ask } from "./view/props";

/** Interval at which a page checks for missing messages. */
const CHECK_MS = 500;
/** Number of checks after which requested data has arrived, unless it was lost. */
const PATIENCE = 3;
/** The same once the document has all: looking at a long one takes time, in every page of a notebook. */
const SETTLED = 60;
/** The kernel sends a message every second: after this time without one, messages were lost. */
const SILENCE_S = 2.5;
/** A longer silence is a problem. */
const NO_CONTACT_S = 4;

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
  /** Whether the page shows something else than the finished picture though the gang has ended. */
  isPictureMissing: () => boolean = () => false;
  /** Closes this page and its views: the notebook was closed, which removes no widget. */
  end: () => void = () => this.close();
  private readonly files = new Files();
  /** Whether everything has arrived since messages were lost. */
  private isWhole = false;
  /** Whether the parts of a full message are arriving, and none was lost so far. */
  private isArriving = false;
  /** Whether the page has had the gang's output: a reader may have cleared it since. */
  private wasHeld = false;
  /** Whether that was in a cell of the notebook. */
  private wasInCell = false;
  /** Whether the kernel is asked to display something again, or has refused it. */
  private isShowAsked = false;
  /** Checks to let pass until something is asked for again. */
  private n_toWait = 0;
  /** Checks to let pass until the output is asked for again, and between the next two requests. */
  private n_toWaitForOutput = 0;
  private outputPatience = PATIENCE;
  /** The same for the content: this page may be one whose outputs the kernel cannot change. */
  private contentPatience = PATIENCE;
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
    if (isClosed(this.model.widget_manager)) {
      this.end();
      return;
    }
    if (this.files.dropLost()) {
      this.said = { ok: false, text: LOST_FILE };
      this.store.changed();
    }
    this.n_toWait -= 1;
    this.n_toWaitForOutput -= 1;
    if (this.refusal !== "" || this.isKernelGone || this.n_toWait > 0) return;
    const { store } = this;
    if (!this.isWhole || (!store.isOver && store.silenceS() > SILENCE_S)) {
      this.hello();
    } else if (!this.isShowAsked) {
      const what = this.missing();
      if (what !== null) void this.show(what);
      else if (store.isOver) this.n_toWait = SETTLED;
    }
  }

  /** Whether the notebook lacks the cell's output, or holds other content than it should. */
  private missing(): "output" | "content" | null {
    const { model, place } = this;
    const held = heldBy(model.widget_manager, place, model.get("gang_id"));
    // An output may be in another widget, such as ipywidgets' Output, in place of a cell.
    const isElsewhere = document.getElementsByClassName(place).length > 0;
    this.wasInCell ||= held !== null && held !== "nothing";
    this.wasHeld ||= isElsewhere || this.wasInCell;
    if (held === "nothing") {
      // A reader who clears the outputs of a cell sees what it prints from then on.
      const isAgain = this.wasInCell && model.get("blocking") && !this.store.isOver;
      // Only the page that ran the cell gets its outputs.
      const isOurs =
        (!this.wasHeld || isAgain) && isFrom(model.widget_manager, model.get("session"));
      return isOurs && this.n_toWaitForOutput <= 0 ? "output" : null;
    }
    const isUnfinished = held === "place" || (held === null && this.isPictureMissing());
    return held === "text" || (this.store.isOver && isUnfinished) ? "content" : null;
  }

  /** The kernel sends the output before its answer: once that came, so has the output, or it is lost. */
  private async show(what: "output" | "content"): Promise<void> {
    this.isShowAsked = true;
    const ack = await this.channel.ask({ do: "show", what });
    this.isShowAsked = !ack.ok;
    if (what === "output") {
      // Each one that goes where this page cannot see it stays there: so there are ever fewer.
      this.n_toWait = PATIENCE;
      this.n_toWaitForOutput = this.outputPatience;
      this.outputPatience *= 2;
    } else {
      this.n_toWait = this.contentPatience;
      this.contentPatience *= 2;
    }
  }

  /** Class of the element in the cell's output that the live view is put into. */
  get place(): string {
    return this.model.get("place");
  }

  close(): void {
    clearInterval(this.timer);
    this.model.off("msg:custom", this.receive);
    this.model.off("comm_live_update", this.disconnected);
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

  private readonly receive = (message: FromKernel, buffers: readonly DataView[] = []) => {
    this.store.heard();
    if (message.kind === "delta") return this.takeDelta(message, buffers);
    if (message.to !== this.channel.client) return;
    if (message.kind === "ack") this.channel.acked(message);
    else if (message.kind === "detail") this.store.applyDetail(message, buffers);
    else this.files.take(message, buffers);
  };

  private takeDelta(delta: Delta, buffers: readonly DataView[]): void {
    const wasOver = this.store.isOver;
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
    if (this.store.isOver && !wasOver) this.n_toWait = PATIENCE; // the picture follows
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
