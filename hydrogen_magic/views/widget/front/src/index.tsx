import { render } from "preact";
import chartStyles from "uplot/dist/uPlot.min.css";
import curveStyles from "./curves/curves.css";
import { type Model, Page } from "./page";
import styles from "./style.css";
import timelineStyles from "./timeline/timeline.css";
import { App } from "./view/App";
import outputStyles from "./view/output.css";
import rankStyles from "./view/ranks.css";

const STYLES = [chartStyles, styles, rankStyles, outputStyles, curveStyles, timelineStyles];

interface Shown {
  model: Model;
  el: HTMLElement;
}

/**
 * What anywidget loads, in its factory form: it is called once per widget, while `render` is called
 * for every view and gets a new `model` object each time. So the gang's state lives out here, and a
 * view that is built anew (the notebook does so when the cell ends) shows it at once.
 */
export default () => {
  let page: Page | null = null;

  function initialize({ model }: { model: Model }) {
    page = new Page(model);
    return () => page?.close();
  }

  function show({ model, el }: Shown) {
    page ??= new Page(model);
    if (!page.store.hasData) page.hello();
    const style = document.createElement("style");
    style.textContent = STYLES.join("\n");
    const root = document.createElement("div");
    el.replaceChildren(style, root);
    render(<App page={page} />, root);
    return () => render(null, root);
  }

  return { initialize, render: show };
};
