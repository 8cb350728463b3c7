import { render } from "preact";
import chartStyles from "uplot/dist/uPlot.min.css";
import curveStyles from "./curves/curves.css";
import { type Model, Page } from "./page";
import { Place } from "./place";
import styles from "./style.css";
import timelineStyles from "./timeline/timeline.css";
import { App } from "./view/App";
import outputStyles from "./view/output.css";
import rankStyles from "./view/ranks.css";

const STYLES = [chartStyles, styles, rankStyles, outputStyles, curveStyles, timelineStyles];

function mount(page: Page, el: HTMLElement): () => void {
  const style = document.createElement("style");
  style.textContent = STYLES.join("\n");
  const root = document.createElement("div");
  el.replaceChildren(style, root);
  render(<App page={page} />, root);
  return () => render(null, root);
}

/** The gang of a widget, and the live view in place of its output. */
function open(model: Model): { page: Page; close: () => void } {
  const page = new Page(model);
  const place = new Place(
    page.place,
    (el) => mount(page, el),
    () => page.store.hasData,
  );
  const unsubscribe = page.store.subscribe(() => place.look());
  const close = () => {
    unsubscribe();
    place.close();
    page.close();
  };
  page.end = close;
  return { page, close };
}

/**
 * The factory that anywidget loads: it is called once per widget, while `render` is called for
 * every view and gets a new `model` object each time. So the gang's state is outside of `render`,
 * and a view that is created again (after a page was reloaded) shows it at once.
 */
export default () => {
  let opened: ReturnType<typeof open> | null = null;

  function initialize({ model }: { model: Model }) {
    opened = open(model);
    return () => opened?.close();
  }

  function show({ model, el }: { model: Model; el: HTMLElement }) {
    opened ??= open(model);
    const { page } = opened;
    if (!page.store.hasData) page.hello();
    return mount(page, el);
  }

  return { initialize, render: show };
};
