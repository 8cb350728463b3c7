/** What notebooks put around HTML of users, with rules for their tables and text that are not for us. */
const FOREIGN_STYLES = ["jp-RenderedHTMLCommon", "rendered_html"];

interface Taken {
  /** The picture, to be restored. */
  picture: Node[];
  /** The live view. */
  root: HTMLElement;
  unmount: () => void;
  unstyle: () => void;
  /** Gives elements of the view the scroll positions and the focus that they lost with the page. */
  restore: () => void;
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

  /** Updates the list of places in the document. */
  look(): void {
    const gone = [...this.taken.keys()].filter((element) => !element.isConnected);
    const fresh = [...this.found].filter((element) => !this.taken.has(element));
    // A notebook that shows an output anew replaces its element: the view, with what the user has chosen
    // in it, moves there.
    for (const [k, element] of fresh.entries()) {
      const before = gone[k];
      if (before !== undefined) this.move(before, element);
      else if (this.isReady()) this.take(element);
    }
    for (const element of gone.slice(fresh.length)) this.leave(element);
  }

  /** Restores the pictures. */
  close(): void {
    this.observer.disconnect();
    for (const element of [...this.taken.keys()]) this.leave(element);
  }

  private take(element: Element): void {
    const root = document.createElement("div");
    const picture = this.put(element, root);
    const unstyle = withoutForeignStyles(element);
    const unmount = this.show(root);
    const [scroll, focus] = [followScrolling(root), followFocus(root)];
    const restore = () => {
      scroll();
      focus();
    };
    this.taken.set(element, { picture, root, unmount, unstyle, restore });
  }

  private move(from: Element, to: Element): void {
    const taken = this.release(from);
    if (taken === undefined) return;
    const picture = this.put(to, taken.root);
    this.taken.set(to, { ...taken, picture, unstyle: withoutForeignStyles(to) });
    taken.restore();
  }

  private leave(element: Element): void {
    this.release(element)?.unmount();
  }

  /** Puts the view into an element; returns what was there. */
  private put(element: Element, root: HTMLElement): Node[] {
    const picture = [...element.childNodes];
    element.replaceChildren(root);
    return picture;
  }

  /** Restores the picture of an element. */
  private release(element: Element): Taken | undefined {
    const taken = this.taken.get(element);
    this.taken.delete(element);
    taken?.unstyle();
    element.replaceChildren(...(taken?.picture ?? []));
    return taken;
  }
}

/** Follows how far elements in `root` are scrolled; returns a function that scrolls them there again. */
function followScrolling(root: HTMLElement): () => void {
  const places = new Map<Element, [left: number, top: number]>();
  const note = ({ target }: Event) =>
    target instanceof Element && places.set(target, [target.scrollLeft, target.scrollTop]);
  root.addEventListener("scroll", note, true);
  return () => {
    for (const [element, [left, top]] of places) element.scrollTo(left, top);
  };
}

/** Follows which element in `root` has the focus; returns a function that focuses it again. */
function followFocus(root: HTMLElement): () => void {
  let focused: HTMLElement | null = null;
  root.addEventListener("focusin", ({ target }) => {
    focused = target instanceof HTMLElement ? target : null;
  });
  // An element that leaves the page loses the focus as well, to nothing; it may be back by then.
  root.addEventListener("focusout", () =>
    setTimeout(() => {
      if (root.isConnected && !root.contains(document.activeElement)) focused = null;
    }),
  );
  return () => focused?.focus({ preventScroll: true });
}

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
