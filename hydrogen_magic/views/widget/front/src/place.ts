import { FINISHED } from "./notebook";

/** What notebooks put around HTML of users, with rules for their tables and text that are not for us. */
const FOREIGN_STYLES = ["jp-RenderedHTMLCommon", "rendered_html"];

interface Taken {
  /** The picture, to be put back. */
  picture: Node[];
  leave: () => void;
}

/**
 * Puts the live view where the gang's output is, wherever and whenever that is in the document.
 *
 * The notebook holds HTML alone, text at first and the finished picture at the end, so that it can be
 * read without a kernel. While there is one that tells of the gang, the page shows the live view in its
 * stead; the notebook's own copy of the output does not change by that. Notebooks take cells out of the
 * document and put them back as the reader scrolls, so this goes on looking.
 */
export class Place {
  private readonly taken = new Map<Element, Taken>();
  private readonly found: HTMLCollectionOf<Element>;
  private readonly observer: MutationObserver;

  constructor(
    className: string,
    private readonly show: (el: HTMLElement) => () => void,
    private readonly isReady: () => boolean,
  ) {
    // stays up to date by itself, so that looking costs nothing while there is nothing
    this.found = document.getElementsByClassName(className);
    this.observer = new MutationObserver(() => this.look());
    this.observer.observe(document.body, { childList: true, subtree: true });
  }

  /** Whether some place in the page has something else than the finished picture. */
  isPictureMissing(): boolean {
    this.look();
    const pictures = [...this.taken.values()].map(({ picture }) => picture);
    return pictures.some((nodes) => !nodes.some(isFinished));
  }

  /** Takes the places there are by now, leaves those that have gone. */
  look(): void {
    for (const element of this.taken.keys()) {
      if (!element.isConnected) this.leave(element);
    }
    if (!this.isReady()) return;
    for (const element of [...this.found]) {
      if (!this.taken.has(element)) this.take(element);
    }
  }

  /** Puts the pictures back. */
  close(): void {
    this.observer.disconnect();
    for (const element of [...this.taken.keys()]) this.leave(element);
  }

  private take(element: Element): void {
    const root = document.createElement("div");
    const picture = [...element.childNodes];
    const unstyle = withoutForeignStyles(element);
    element.replaceChildren(root);
    const unmount = this.show(root);
    const leave = () => {
      unmount();
      unstyle();
    };
    this.taken.set(element, { picture, leave });
  }

  private leave(element: Element): void {
    const taken = this.taken.get(element);
    this.taken.delete(element);
    taken?.leave();
    element.replaceChildren(...(taken?.picture ?? []));
  }
}

const isFinished = (node: Node) => node instanceof Element && node.classList.contains(FINISHED);

/** Takes the notebook's styles for HTML off what is around `element`; returns how to undo it. */
function withoutForeignStyles(element: Element): () => void {
  const undo = FOREIGN_STYLES.map((name) => {
    const styled = element.closest(`.${name}`);
    styled?.classList.remove(name);
    return () => styled?.classList.add(name);
  });
  return () => {
    for (const each of undo) each();
  };
}
