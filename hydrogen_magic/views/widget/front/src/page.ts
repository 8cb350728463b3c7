import { Channel, randomId } from "./channel";
import { Files } from "./download";
import { interruptKernel } from "./interrupt";
import type { Ack, Delta, FromKernel, Traits } from "./protocol";
import { Stopping } from "./stopping";
import { Store } from "./store";
import type { Ask } from "./view/props";

/** What we use of the model that anywidget hands over. */
export interface Model {
  get<K extends keyof Traits>(name: K): Traits[K];
  on(event: string, callback: (...args: never[]) => void): void;
  off(event: string, callback: (...args: never[]) => void): void;
  send(content: unknown): void;
}

/**
 * One gang in this page: its state and the ways to its kernel. There is one per widget, however
 * often and in how many places the widget is shown.
 */
export class Page {
  readonly store: Store;
  readonly channel: Channel;
  readonly stopping: Stopping;
  /** What the kernel said to the reader's last order, where it said more than yes. */
  said: Ack | null = null;
  /** Why the kernel tells nothing of this gang; empty while it may still come. */
  refusal = "";
  private readonly files = new Files();

  constructor(
    private readonly model: Model,
    client = randomId(),
  ) {
    this.store = new Store(client);
    this.channel = new Channel(client, (sent) => model.send(sent));
    this.stopping = new Stopping({
      ask: (order) => this.channel.ask(order),
      interrupt: () => interruptKernel(model.get("kernel_id")),
      isBlocking: () => model.get("blocking"),
      changed: () => this.store.changed(),
    });
    model.on("msg:custom", this.receive);
    this.hello();
  }

  /** Gives an order of the reader's; what the kernel has to say to it is shown in the header. */
  readonly ask: Ask = async (order) => {
    this.said = null;
    const ack = await this.channel.ask(order);
    if (ack.text) this.said = ack;
    this.store.changed();
    return ack;
  };

  /** Asks for everything, unless that is being asked already. */
  hello(): void {
    void this.channel.hello()?.then((ack) => {
      this.refusal = ack.ok ? "" : (ack.text ?? "");
      this.store.changed();
    });
  }

  /** Class of the element in the cell's output that the live view is put into. */
  get place(): string {
    return this.model.get("place");
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
    this.channel.close();
    this.stopping.close();
  }

  private readonly receive = (message: FromKernel, buffers: readonly DataView[] = []) => {
    if (message.kind === "delta") return this.takeDelta(message, buffers);
    if (message.to !== this.channel.client) return;
    if (message.kind === "ack") this.channel.acked(message);
    else if (message.kind === "detail") this.store.applyDetail(message, buffers);
    else this.files.take(message, buffers);
  };

  private takeDelta(delta: Delta, buffers: readonly DataView[]): void {
    const applied = this.store.apply(delta, buffers);
    if (applied === "ignored") return;
    if (applied === "gap") this.hello();
    if (delta.full) this.channel.greeted();
    this.followState();
  }

  private followState(): void {
    const word = this.store.gang?.state;
    if (word === "stopping" || word === "killing") this.stopping.seen();
    else if (this.store.isOver) this.stopping.reset();
  }
}
