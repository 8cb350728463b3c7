"""What the live view shows, in both themes, and who can use it."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import NewRun, OpenNotebook
from tests.browser.gangs import FAILING, LOAD, NEXT, STUCK, TRAINING
from tests.browser.page import PATIENCE_MS
from tests.jupyter import gone_within

pytestmark = pytest.mark.browser

LEGIBLE = 4.5
"""Least contrast of text on its ground that the Web's accessibility guidelines ask for."""

CONTRASTS = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", {willReadFrequently: true});
  const paint = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) =>
      c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = (element) => {
    const found = [];
    for (let e = element; e; e = e.parentElement) found.unshift(getComputedStyle(e).backgroundColor);
    return ["white", ...found];
  };
  const texts = [...document.querySelectorAll(".hm *")].filter((e) =>
    e.checkVisibility() && e.getAttribute("aria-disabled") !== "true" &&
    [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()));
  return texts.map((element) => {
    const below = grounds(element);
    const a = luminance(paint(below));
    const b = luminance(paint([...below, getComputedStyle(element).color]));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    return [`${element.className || element.localName}: ${element.textContent}`, contrast];
  });
}"""

INK = """(canvas) => {
  if (!canvas.width || !canvas.height) return false;
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return data.some((value, i) => i % 4 === 3 && value > 0);
}"""

REACHABLE = """() => {
  const all = document.querySelectorAll(
    ".hm button, .hm a[href], .hm input, .hm select, .hm [tabindex='0']");
  const name = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.title
    || e.labels?.[0]?.textContent.trim() || "";
  const found = [...all].filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0);
  found.forEach((element, i) => { element.dataset.reach = String(i); });
  return found.map(name);
}"""


def test_a_failure_is_shown_with_the_culprits_line(open_notebook: OpenNotebook) -> None:
    page = open_notebook(LOAD, FAILING, NEXT)
    page.run(0)
    page.run(1)
    expect(page.state(1)).to_have_attribute("data-state", "failed")
    failure = page.widget(1).locator(".hm-failure")
    expect(failure).to_contain_text("rank 1")
    expect(failure).to_contain_text("ValueError: bad batch 17")
    expect(failure).to_contain_text('raise ValueError("bad batch 17")')
    page.run(2)
    page.shows(2, "42")


def test_curves_and_timeline_are_drawn_in_both_themes(open_notebook: OpenNotebook) -> None:
    page = open_notebook(LOAD, TRAINING)
    page.run(0)
    page.run(1)
    expect(page.state(1)).to_have_attribute("data-state", "done")
    for section in ("ranks", "curves", "timeline", "output"):
        expect(page.widget(1).locator(f".hm-{section}")).to_be_visible()
    expect(page.widget(1).locator(".hm-ranks")).to_contain_text("200/200")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        page.set_theme(theme)
        _wait_for_ink(page.page)
        faint = {text: ratio for text, ratio in page.page.evaluate(CONTRASTS) if ratio < LEGIBLE}
        assert faint == {}, theme


def _wait_for_ink(page: Page) -> None:
    """Wait until something is drawn on every canvas."""
    canvases = page.locator(".hm canvas:visible")
    expect(canvases.first).to_be_visible()
    for canvas in canvases.all():
        canvas.scroll_into_view_if_needed()  # what is out of sight is not drawn
        page.wait_for_function(INK, arg=canvas.element_handle(), timeout=PATIENCE_MS)


def test_everything_is_reached_by_keyboard(open_notebook: OpenNotebook, new_run: NewRun) -> None:
    page = open_notebook(LOAD, STUCK)
    page.run(0)
    page.start(1)
    pids = new_run().met(4)
    expect(page.widget(1)).to_contain_text("all met")
    names = page.page.evaluate(REACHABLE)
    assert len(names) > 4 and all(names), "every control has a name"
    assert _walk(page.page, len(names)) == list(range(len(names)))
    page.widget(1).locator(".hm-stop").focus()
    page.page.keyboard.press("Enter")
    assert gone_within(pids, 1.0)
    page.finish(1)


def _walk(page: Page, n_steps: int) -> list[int]:
    """Press Tab from the first control on; return which were focused."""
    page.locator(".hm [data-reach='0']").focus()
    focused = []
    for _ in range(n_steps):
        focused.append(int(page.evaluate("document.activeElement.dataset.reach ?? -1")))
        page.keyboard.press("Tab")
    return focused


def test_keys_meant_for_the_view_do_not_reach_the_notebook(open_notebook: OpenNotebook) -> None:
    page = open_notebook(LOAD, TRAINING)
    page.run(0)
    page.run(1)
    for place in (".hm-log", ".hm-timeline [tabindex='0']"):
        page.widget(1).locator(place).first.focus()
        for key in ("0", "0", "d", "d", "b"):
            page.page.keyboard.press(key)
    assert _cells_and_dialogs(page.page) == [2, 0]


def _cells_and_dialogs(page: Page) -> Any:
    """Count them once the notebook has had time to act on a key: two frames."""
    return page.evaluate("""() => new Promise((done) => {
      const count = (what) => document.querySelectorAll(what).length;
      const answer = () => done([count(".jp-CodeCell"), count(".jp-Dialog")]);
      requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(answer)));
    })""")
