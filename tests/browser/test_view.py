"""What the live view shows, in both themes, and that it can be used by keyboard."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import NewRun
from tests.browser.gangs import (
    ASKING,
    CAPTURED,
    FAILING,
    IN_OUTPUT,
    LOGGING,
    NEXT,
    TRAINING,
    WAITING,
    Run,
)
from tests.browser.page import PATIENCE_MS, NotebookPage

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

LEGIBLE = 4.5
"""Least contrast of text on its background, by the Web Content Accessibility Guidelines."""

CONTRASTS = """(widget) => {
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
  const texts = [...widget.querySelectorAll("*")].filter((e) =>
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
THEMES = ("JupyterLab Dark", "JupyterLab Light")

REACHABLE = """(widget) => {
  const all = widget.querySelectorAll("button, a[href], input, select, summary, [tabindex='0']");
  const name = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.title
    || e.labels?.[0]?.textContent.trim() || "";
  const found = [...all].filter((e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0);
  found.forEach((element, i) => { element.dataset.reach = String(i); });
  return found.map(name);
}"""


def test_a_failure_is_shown_with_the_culprits_line(lab: NotebookPage) -> None:
    lab.run(FAILING)
    expect(lab.state(FAILING)).to_have_attribute("data-state", "failed")
    failure = lab.widget(FAILING).locator(".hm-failure")
    expect(failure).to_contain_text("rank 1")
    expect(failure).to_contain_text("ValueError: bad batch 17")
    expect(failure).to_contain_text('raise ValueError("bad batch 17")')
    lab.run(NEXT)
    lab.shows(NEXT, "42")


def test_a_rank_displays_and_asks_below_its_view(lab: NotebookPage) -> None:
    lab.start(ASKING)
    line = lab.cell(ASKING).locator("input.jp-Stdin-input")
    expect(lab.widget(ASKING)).to_contain_text("rank 0 is waiting for input")
    expect(lab.cell(ASKING).locator(".of-a-rank")).to_have_text("wait")
    line.fill("Ada")
    line.press("Enter")
    lab.finish(ASKING)
    lab.page.wait_for_function(NO_PENDING_INPUT)  # else it refuses the next cell
    expect(line).to_have_count(0)  # it goes after half a second, and moves the focus
    expect(lab.cell(ASKING).locator(".of-a-rank")).to_have_text("Ada")
    expect(lab.widget(ASKING)).to_contain_text("printed by rank 1")


def test_a_gang_is_shown_once_where_its_output_goes(lab: NotebookPage) -> None:
    lab.run(IN_OUTPUT)
    expect(lab.state(IN_OUTPUT)).to_have_attribute("data-state", "done")
    lab.run(CAPTURED)
    lab.run(NEXT)
    expect(lab.widget(IN_OUTPUT)).to_have_count(1)
    expect(lab.widget(CAPTURED)).to_have_count(0)


NO_PENDING_INPUT = "() => !window.jupyterapp.shell.currentWidget.sessionContext.pendingInput"


@pytest.mark.exhaustive  # test_looks plays scenes in both themes
def test_curves_and_timeline_are_drawn_in_both_themes(lab: NotebookPage) -> None:
    lab.run(TRAINING)
    widget = lab.widget(TRAINING)
    expect(lab.state(TRAINING)).to_have_attribute("data-state", "done")
    for section in ("ranks", "curves", "timeline", "output"):
        expect(widget.locator(f".hm-{section}")).to_be_visible()
    expect(widget.locator(".hm-ranks")).to_contain_text("200/200")
    for theme in THEMES:
        lab.set_theme(theme)
        _is_legible(widget, theme)


@pytest.mark.exhaustive  # test_stop clicks the same button
def test_stop_is_heard_while_ranks_log_as_much_as_they_may_and_the_theme_changes(
    lab: NotebookPage, new_run: NewRun
) -> None:
    lab.start(LOGGING)
    run = new_run()
    pids = run.met(4)
    widget = lab.widget(LOGGING)
    expect(widget.locator(".hm-curves figure")).to_have_count(4)
    for theme in THEMES:
        lab.set_theme(theme)
    _is_legible(widget, theme)
    assert lab.is_running(LOGGING)
    _stop(lab, LOGGING, run, pids)


def _wait_for_ink(within: Locator) -> None:
    """Wait until something is drawn on every canvas; a canvas out of sight is left empty."""
    for chart in within.locator("figure").all():
        chart.scroll_into_view_if_needed()
        expect(chart.locator("canvas")).to_be_visible()
    canvases = within.locator("canvas:visible")
    expect(canvases.first).to_be_visible()
    for canvas in canvases.all():
        canvas.scroll_into_view_if_needed()
        within.page.wait_for_function(INK, arg=canvas.element_handle(), timeout=PATIENCE_MS)


def _is_legible(widget: Locator, theme: str) -> None:
    """Check that something is drawn on every canvas, and that all text is legible."""
    _wait_for_ink(widget)
    faint = {text: ratio for text, ratio in widget.evaluate(CONTRASTS) if ratio < LEGIBLE}
    assert faint == {}, theme


def _stop(page: NotebookPage, cell: str, run: Run, pids: list[int]) -> None:
    page.widget(cell).locator(".hm-stop").click()
    run.ended_by_user(pids)
    page.finish(cell)


def test_every_control_is_reached_by_keyboard(lab: NotebookPage, new_run: NewRun) -> None:
    lab.start(WAITING)
    run = new_run()
    pids = run.met(2)
    widget = lab.widget(WAITING)
    expect(widget).to_contain_text("all met")
    names = widget.evaluate(REACHABLE)
    assert len(names) > 4 and all(names), "every control has a name"
    assert _walk(widget, len(names)) == list(range(len(names)))
    widget.locator(".hm-stop").focus()
    lab.page.keyboard.press("Enter")
    run.ended_by_user(pids)
    lab.finish(WAITING)


def _walk(widget: Locator, n_steps: int) -> list[int]:
    """Press Tab from the first control on; return which were focused."""
    widget.locator("[data-reach='0']").focus()
    focused = []
    for _ in range(n_steps):
        focused.append(int(widget.page.evaluate("document.activeElement.dataset.reach ?? -1")))
        widget.page.keyboard.press("Tab")
    return focused


def test_keys_meant_for_the_view_do_not_reach_the_notebook(lab: NotebookPage) -> None:
    lab.run(TRAINING)
    before = _cells_and_dialogs(lab.page)
    for place in (".hm-log", ".hm-timeline [tabindex='0']"):
        lab.widget(TRAINING).locator(place).first.focus()
        for key in ("0", "0", "d", "d", "b"):
            lab.page.keyboard.press(key)
    assert _cells_and_dialogs(lab.page) == before


def _cells_and_dialogs(page: Page) -> Any:
    """Count them once the notebook has had time to act on a key: two frames."""
    return page.evaluate("""() => new Promise((done) => {
      const count = (what) => document.querySelectorAll(what).length;
      const answer = () => done([count(".jp-CodeCell"), count(".jp-Dialog")]);
      requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(answer)));
    })""")
