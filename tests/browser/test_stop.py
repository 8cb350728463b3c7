"""Stop, clicked in a browser while the cell runs: whatever the front end, whatever the kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from hydrogen_magic import events as ev
from tests.browser.conftest import NewRun, OpenNotebook
from tests.browser.front_ends import CLASSIC, LAB, NOTEBOOK, FrontEnd
from tests.browser.gangs import LOAD, NEXT, SLOW_TO_END, STUCK
from tests.browser.page import PATIENCE_MS
from tests.jupyter import gone_within
from tests.kernels import NEWEST, VERSIONS

pytestmark = pytest.mark.browser

HEARD_S = 0.1
"""From the click to the kernel's taking it."""
GONE_S = 1.0
"""From the click to the end of the last process."""

STOP = ".hm-stop:not(.hm-kill)"
PLACES = [(LAB, version) for version in VERSIONS] + [(NOTEBOOK, NEWEST), (CLASSIC, NEWEST)]


@pytest.mark.parametrize(
    ("front_end", "version"), PLACES, ids=lambda each: getattr(each, "name", each)
)
def test_a_click_ends_a_gang_that_is_stuck(
    open_notebook: OpenNotebook, new_run: NewRun, front_end: FrontEnd, version: str
) -> None:
    page = open_notebook(LOAD, STUCK, NEXT, front_end=front_end, version=version)
    page.run(0)
    page.start(1)
    run = new_run()
    pids = run.met(4)
    assert page.is_running(1)
    page.widget(1).locator(STOP).click()
    assert gone_within(pids, GONE_S)
    assert run.stopped_at() - page.clicked_at() < HEARD_S
    page.finish(1)
    page.shows(1, "stopped by you")
    expect(page.state(1)).to_have_attribute("data-state", "stopped")
    page.run(2)
    page.shows(2, "42")


def test_a_detached_gang_is_stopped(open_notebook: OpenNotebook, new_run: NewRun) -> None:
    page = open_notebook(LOAD, STUCK.replace("--np 4", "--np 4 --detach"), NEXT)
    page.run(0)
    page.run(1)
    run = new_run()
    pids = run.met(4)
    page.run(2)
    page.shows(2, "42")
    page.widget(1).locator(STOP).click()
    assert gone_within(pids, GONE_S)
    assert run.stopped_at() - page.clicked_at() < HEARD_S
    expect(page.state(1)).to_have_attribute("data-state", "stopped")


def test_ranks_that_take_their_time_are_killed_by_a_second_button(
    open_notebook: OpenNotebook, new_run: NewRun
) -> None:
    page = open_notebook(LOAD, SLOW_TO_END)
    page.run(0)
    page.start(1)
    pids = new_run().met(2)
    page.widget(1).locator(STOP).click()
    expect(page.widget(1).locator(STOP)).to_have_text("Stopping…")
    page.widget(1).locator(".hm-kill").click()
    assert gone_within(pids, GONE_S)
    page.finish(1)
    page.shows(1, "stopped by you")


def test_the_square_button_does_as_stop_does(open_notebook: OpenNotebook, new_run: NewRun) -> None:
    page = open_notebook(LOAD, STUCK, NEXT)
    page.run(0)
    page.start(1)
    pids = new_run().met(4)
    page.interrupt()
    assert gone_within(pids, GONE_S)
    page.finish(1)
    expect(page.state(1)).to_have_attribute("data-state", "stopped")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_page_that_is_loaded_anew_shows_the_gang_and_stops_it(
    open_notebook: OpenNotebook, new_run: NewRun, version: str
) -> None:
    page = open_notebook(LOAD, STUCK, NEXT, version=version)
    page.run(0)
    page.start(1)
    run = new_run()
    pids = run.met(4)
    page.save(1, "application/vnd.jupyter.widget-view+json", "model_id")
    page.reload()
    expect(page.state(1)).to_have_attribute("data-state", "running", timeout=PATIENCE_MS)
    expect(page.widget(1)).to_contain_text("all met")
    page.widget(1).locator(STOP).click()
    assert gone_within(pids, GONE_S)
    assert run.all(ev.StopRequested)[0].reason == "user"
    expect(page.state(1)).to_have_attribute("data-state", "stopped")
    page.run(2)
    page.shows(2, "42")


def test_a_second_tab_shows_the_gang_and_stops_it_for_both(
    open_notebook: OpenNotebook, new_run: NewRun
) -> None:
    first = open_notebook(LOAD, STUCK)
    first.run(0)
    first.start(1)
    pids = new_run().met(4)
    first.save(1, "application/vnd.jupyter.widget-view+json", "model_id")
    second = first.second_tab()
    expect(second.state(1)).to_have_attribute("data-state", "running", timeout=PATIENCE_MS)
    second.widget(1).locator(STOP).click()
    assert gone_within(pids, GONE_S)
    for page in (first, second):
        expect(page.state(1)).to_have_attribute("data-state", "stopped")
