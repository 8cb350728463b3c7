import { FINISHED } from "./notebook";

/** What notebooks put around HTML of users, with rules for their tables and text that are not for us. */
const FOREIGN_STYLES = ["jp-RenderedHTMLCommon", "rendered_html"];

interface Taken {
  /** The picture, to be restored. */
  picture: Node[];
  leave: () => void;
}

/**
 * Puts the live view in the place of the gang's output, wherever and whenever that is in the
 * document. The notebook contains only HTML, initially text and finally the static picture, so that
 * it is readable without a kernel. While a kernel sends data of the gang, the page shows the live
 * view in its place; the notebook's own copy of the output does not change. Notebooks remove cells
 * from the document and insert them again as the user scrolls, so this continues to check.
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
    // live collection: checking it costs nothing while it is empty
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

  /** Updates the list of places in the document. */
  look(): void {
    for (const element of this.taken.keys()) {
      if (!element.isConnected) this.leave(element);
    }
    if (!this.isReady()) return;
    for (const element of [...this.found]) {
      if (!this.taken.has(element)) this.take(element);
    }
  }

  /** Restores the pictures. */
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

/**
 * Removes the notebook's HTML styles from elements around `element`; returns a function that
 * restores them.
 */
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
