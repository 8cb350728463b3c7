"""Stop, clicked in a browser while the cell runs: whatever the front end, whatever the kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from hydrogen_magic import events as ev
from tests.browser.conftest import NewRun, OpenTab
from tests.browser.front_ends import CLASSIC, LAB, NOTEBOOK, FrontEnd
from tests.browser.gangs import DETACHED, LOGGING, NEXT, SLOW_TO_END, STUCK, Run
from tests.browser.page import NotebookPage
from tests.jupyter import gone_within
from tests.kernels import NEWEST, VERSIONS

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

HEARD_S = 0.1
"""From the click to the kernel's taking it."""
GONE_S = 1.0
"""From the click to the end of the last process."""

STOP = ".hm-stop:not(.hm-kill)"
PLACES = [(LAB, version) for version in VERSIONS] + [(NOTEBOOK, NEWEST), (CLASSIC, NEWEST)]


def _stop(page: NotebookPage, cell: str, run: Run, pids: list[int]) -> None:
    """Click on Stop; see how soon the kernel heard of it, and how soon the ranks were gone."""
    page.widget(cell).locator(STOP).click()
    assert gone_within(pids, GONE_S)
    assert run.stopped_at() - page.clicked_at() < HEARD_S
    expect(page.state(cell)).to_have_attribute("data-state", "stopped")


@pytest.mark.parametrize(
    ("front_end", "version"), PLACES, ids=lambda each: getattr(each, "name", each)
)
def test_a_click_ends_a_gang_that_is_stuck(
    open_tab: OpenTab, new_run: NewRun, front_end: FrontEnd, version: str
) -> None:
    page = open_tab(front_end, version)
    page.start(STUCK)
    run = new_run()
    pids = run.met(4)
    assert page.is_running(STUCK)
    _stop(page, STUCK, run, pids)
    page.finish(STUCK)
    page.shows(STUCK, "stopped by you")
    page.run(NEXT)
    page.shows(NEXT, "42")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_detached_gang_is_stopped_while_the_kernel_is_idle(
    open_tab: OpenTab, new_run: NewRun, version: str
) -> None:
    page = open_tab(version=version)
    page.run(DETACHED)
    run = new_run()
    pids = run.met(4)
    page.run(NEXT)
    page.shows(NEXT, "42")
    _stop(page, DETACHED, run, pids)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_page_that_is_loaded_anew_shows_the_gang_and_stops_it(
    open_tab: OpenTab, new_run: NewRun, version: str
) -> None:
    page = open_tab(version=version)
    page.start(STUCK)
    run = new_run()
    pids = run.met(4)
    page.save(STUCK, "text/plain", f"gang {run.id} ")
    page.reload()
    expect(page.state(STUCK)).to_have_attribute("data-state", "running")
    expect(page.widget(STUCK)).to_contain_text("all met")
    _stop(page, STUCK, run, pids)
    assert run.all(ev.StopRequested)[0].reason == "user"
    page.run(NEXT)
    page.shows(NEXT, "42")


def test_a_second_tab_shows_the_gang_and_stops_it_for_both(
    lab: NotebookPage, new_run: NewRun
) -> None:
    lab.start(STUCK)
    run = new_run()
    pids = run.met(4)
    lab.save(STUCK, "text/plain", f"gang {run.id} ")
    second = lab.second_tab()
    expect(second.state(STUCK)).to_have_attribute("data-state", "running")
    second.widget(STUCK).locator(STOP).click()
    assert gone_within(pids, GONE_S)
    for page in (lab, second):
        expect(page.state(STUCK)).to_have_attribute("data-state", "stopped")
    second.page.close()
    lab.finish(STUCK)


def test_stop_is_heard_while_ranks_log_as_much_as_they_may(
    lab: NotebookPage, new_run: NewRun
) -> None:
    lab.start(LOGGING)
    run = new_run()
    pids = run.met(8)
    charts = lab.widget(LOGGING).locator(".hm-curves figure")
    expect(charts).to_have_count(4)
    charts.first.scroll_into_view_if_needed()  # what is out of sight is not drawn
    expect(charts.first.locator("canvas")).to_be_visible()
    _stop(lab, LOGGING, run, pids)
    lab.finish(LOGGING)


def test_ranks_that_take_their_time_are_killed_by_a_second_button(
    lab: NotebookPage, new_run: NewRun
) -> None:
    lab.start(SLOW_TO_END)
    pids = new_run().met(2)
    lab.widget(SLOW_TO_END).locator(STOP).click()
    expect(lab.widget(SLOW_TO_END).locator(STOP)).to_have_text("Stopping…")
    lab.widget(SLOW_TO_END).locator(".hm-kill").click()
    assert gone_within(pids, GONE_S)
    lab.finish(SLOW_TO_END)
    lab.shows(SLOW_TO_END, "stopped by you")


def test_the_square_button_does_as_stop_does(lab: NotebookPage, new_run: NewRun) -> None:
    lab.start(STUCK)
    pids = new_run().met(4)
    lab.interrupt()
    assert gone_within(pids, GONE_S)
    lab.finish(STUCK)
    expect(lab.state(STUCK)).to_have_attribute("data-state", "stopped")
