"""The live view on a page of its own, with a kernel that is played: no gang and no server is needed."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from playwright.sync_api import Browser, Locator, Page

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.views.widget.display import BUNDLE
from hydrogen_magic.views.widget.page_updates import PageMessage, PageUpdates
from tests.gangs import PATIENCE_S

__all__ = ["PlayedView", "messages_of", "open_page"]

_POLL_S = 0.05
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; padding: 12px; background: var(--jp-layout-color0); }
body { --jp-ui-font-family: system-ui, "DejaVu Sans", sans-serif; --jp-code-font-family: monospace; }
[data-jp-theme-light="true"] { --jp-layout-color0: #fff; --jp-ui-font-color1: rgba(0, 0, 0, 0.87);
  --jp-border-color2: #e0e0e0; --jp-brand-color1: #1976d2; --jp-error-color1: #d32f2f; }
[data-jp-theme-light="false"] { --jp-layout-color0: #111; --jp-ui-font-color1: #fff;
  --jp-border-color2: #424242; --jp-brand-color1: #2196f3; --jp-error-color1: #f44336; }
</style><body data-jp-theme-light="true"></body>"""
"""JupyterLab's variables, as its two themes have them."""

_LOAD = """async (source) => {
  const url = URL.createObjectURL(new Blob([source], {type: "text/javascript"}));
  window.hydrogen = await import(url);
}"""
_OPEN = """() => {
  const widget = window.hydrogen.default();
  const callbacks = new Set();
  window.orders = [];
  const traits = {kernel_id: "", blocking: true, place: "no-place", withdrawn: 0};
  const model = {
    get: (name) => traits[name], send: (order) => window.orders.push(order),
    on: (event, callback) => event === "msg:custom" && callbacks.add(callback),
    off: (event, callback) => callbacks.delete(callback),
  };
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  window.say = (content, buffers) => callbacks.forEach((call) => call(content, buffers.map(bytes)));
  const view = document.createElement("div");
  document.body.append(view);
  const close = [widget.initialize({model}), widget.render({model, el: view})];
  window.leave = () => { close.forEach((end) => end?.()); view.remove(); };
}"""

_PROBLEMS = """(widget) => {
  const problems = [];
  const name = (e) => `${e.className || e.localName}: ${e.textContent.slice(0, 60)}`;
  const scrolls = (e) => e.closest(".hm-log, .hm-scroll, pre") !== null;
  const whole = widget.getBoundingClientRect();
  const own = [...widget.querySelectorAll("*")].filter((e) => e.localName !== "style" &&
    e.localName !== "option" && e.checkVisibility() && e.getClientRects().length &&
    [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()));
  for (const e of own) {
    const box = e.getBoundingClientRect();
    if (!scrolls(e) && (box.right > whole.right + 1 || box.left < whole.left - 5))
      problems.push(`outside ${name(e)}`);
    const style = getComputedStyle(e);
    const isCut = style.overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1;
    if (isCut) problems.push(`clipped ${name(e)}`);
    for (let up = e.parentElement; up !== widget && !scrolls(e); up = up.parentElement) {
      const isHidden = getComputedStyle(up).overflowY === "hidden";
      if (isHidden && box.bottom > up.getBoundingClientRect().bottom + 1)
        problems.push(`clipped below ${name(e)}`);
    }
  }
  for (const scroll of widget.querySelectorAll(".hm-scroll"))
    if (scroll.scrollWidth > scroll.clientWidth + 1) problems.push(`wide ${name(scroll)}`);
  const boxes = own.filter((e) => !scrolls(e) || e.closest("td, th")).map((e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    return [e, range.getBoundingClientRect()];
  });
  boxes.forEach(([a, x], i) => boxes.slice(i + 1).forEach(([b, y]) => {
    if (a.contains(b) || b.contains(a)) return;
    const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left);
    const high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
    if (wide > 2 && high > 4) problems.push(`overlap ${name(a)} | ${name(b)}`);
  }));
  return problems;
}"""


def open_page(browser: Browser) -> Page:
    """Return a page that has loaded the live view's code."""
    page = browser.new_page()
    page.set_content(_PAGE)
    page.evaluate(_LOAD, BUNDLE.read_text("utf-8"))
    return page


class PlayedView:
    """One gang, shown on a page alone, by :func:`open_page`, until it is closed."""

    def __init__(self, page: Page, width: int = 1000) -> None:
        self.page = page
        self.set_width(width)
        self.set_dark(False)
        page.evaluate(_OPEN)

    def say(self, messages: Iterable[PageMessage]) -> None:
        """Have the kernel send messages, and the page paint them."""
        for content, buffers in messages:
            encoded = [base64.b64encode(buffer).decode("ascii") for buffer in buffers]
            self.page.evaluate("([content, buffers]) => say(content, buffers)", [content, encoded])
        self.page.evaluate("() => new Promise((done) => setTimeout(done, 350))")

    @property
    def widget(self) -> Locator:
        return self.page.locator(".hm")

    def set_dark(self, is_dark: bool) -> None:
        light = "false" if is_dark else "true"
        self.page.evaluate("(light) => { document.body.dataset.jpThemeLight = light; }", light)

    def set_width(self, width: int) -> None:
        self.page.set_viewport_size({"width": width + 24, "height": 1400})

    def problems(self) -> list[str]:
        """Return which texts are clipped, outside of the view, or over each other, once it is laid out."""
        deadline = time.monotonic() + PATIENCE_S
        found: list[str] = self.widget.evaluate(_PROBLEMS)
        while found and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = self.widget.evaluate(_PROBLEMS)
        return found

    def orders(self, what: str) -> list[dict[str, Any]]:
        """Return what the page asked the kernel for."""
        orders: list[dict[str, Any]] = self.page.evaluate("() => window.orders")
        return [order for order in orders if order["do"] == what]

    def close(self) -> None:
        self.page.evaluate("() => window.leave()")


def messages_of(
    events: Sequence[ev.Event], now_s: float, feed: PageUpdates | None = None
) -> Iterator[PageMessage]:
    """Yield what a page is sent of a gang to which all these events have happened."""
    feed, state = feed or PageUpdates(is_raised=True), replay(events)
    fresh = events
    while (message := feed.update(state, fresh, now_s)) is not None:
        yield message
        fresh, now_s = (), now_s + (0.0 if state.is_terminal else 0.1)
        if not message.buffers and not state.is_terminal:
            return
