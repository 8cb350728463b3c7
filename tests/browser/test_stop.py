"""Stop, clicked in a browser while the cell runs: in each front end, with each version of the kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import NewRun, OpenTab
from tests.browser.front_ends import CLASSIC, LAB, NOTEBOOK, FrontEnd
from tests.browser.gangs import (
    ASKING_AS_A_PEER_FAILS,
    ASKING_TOO_LONG,
    DETACHED,
    NEXT,
    SLOW_TO_END,
    STUCK,
    WAITING,
)
from tests.browser.page import NotebookPage
from tests.kernels import EACH, NEWEST, OLDER, VERSIONS

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

STOP = ".hm-stop:not(.hm-kill)"


def _stop(page: NotebookPage, cell: str) -> None:
    page.widget(cell).locator(STOP).click()
    expect(page.state(cell)).to_have_attribute("data-state", "stopped")


def _is_free(page: NotebookPage) -> None:
    page.run(NEXT)
    page.shows(NEXT, "42")


@pytest.mark.parametrize(
    ("front_end", "version", "cell", "n_ranks"),
    [
        pytest.param(LAB, NEWEST, WAITING, 2, id="lab"),
        # whose ranks import torch; the contract suite stops such gangs
        pytest.param(LAB, NEWEST, STUCK, 4, id="lab-stuck", marks=pytest.mark.exhaustive),
        pytest.param(NOTEBOOK, NEWEST, WAITING, 2, id="notebook", marks=pytest.mark.exhaustive),
        pytest.param(CLASSIC, NEWEST, WAITING, 2, id="nbclassic", marks=pytest.mark.exhaustive),
        *(
            pytest.param(
                LAB, version, WAITING, 2, id=f"lab-{version}", marks=pytest.mark.exhaustive
            )
            for version in OLDER
        ),
    ],
)
def test_a_click_ends_a_gang_while_its_cell_runs(
    open_tab: OpenTab, new_run: NewRun, front_end: FrontEnd, version: str, cell: str, n_ranks: int
) -> None:
    page = open_tab(front_end, version)
    page.start(cell)
    run = new_run()
    pids = run.met(n_ranks)
    assert page.is_running(cell)
    _stop(page, cell)
    run.ended_by_user(pids)
    page.finish(cell)
    page.shows(cell, "stopped by you")
    _is_free(page)


@pytest.mark.parametrize("version", EACH)
def test_a_detached_gang_is_stopped_while_the_kernel_is_idle(
    open_tab: OpenTab, new_run: NewRun, version: str
) -> None:
    page = open_tab(version=version)
    page.run(DETACHED)
    run = new_run()
    pids = run.met(2)
    _is_free(page)
    _stop(page, DETACHED)
    run.ended_by_user(pids)


@pytest.mark.exhaustive  # the next test reloads the page
def test_a_second_tab_shows_the_gang_and_stops_it_for_both(
    lab: NotebookPage, new_run: NewRun
) -> None:
    lab.start(WAITING)
    run = new_run()
    pids = run.met(2)
    lab.save(WAITING, "text/plain", f"gang {run.id} ")
    second = lab.second_tab()
    expect(second.state(WAITING)).to_have_attribute("data-state", "running")
    expect(second.widget(WAITING)).to_contain_text("all met")
    _stop(second, WAITING)
    expect(lab.state(WAITING)).to_have_attribute("data-state", "stopped")
    run.ended_by_user(pids)
    second.page.close()
    lab.finish(WAITING)


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", VERSIONS)
def test_a_reloaded_page_shows_the_gang_and_stops_it(
    open_tab: OpenTab, new_run: NewRun, version: str
) -> None:
    """As a second tab, in each version of the kernel."""
    page = open_tab(version=version)
    page.start(WAITING)
    run = new_run()
    pids = run.met(2)
    page.save(WAITING, "text/plain", f"gang {run.id} ")
    page.reload()
    expect(page.state(WAITING)).to_have_attribute("data-state", "running")
    expect(page.widget(WAITING)).to_contain_text("all met")
    _stop(page, WAITING)
    run.ended_by_user(pids)
    _is_free(page)


def test_a_second_button_kills_ranks_that_clean_up_for_long(
    lab: NotebookPage, new_run: NewRun
) -> None:
    lab.start(SLOW_TO_END)
    run = new_run()
    pids = run.met(2)
    widget = lab.widget(SLOW_TO_END)
    widget.locator(STOP).click()
    expect(widget.locator(STOP)).to_have_text("Stopping…")
    widget.locator(".hm-kill").click()
    run.ended_by_user(pids, kills=(False, True))
    lab.finish(SLOW_TO_END)
    lab.shows(SLOW_TO_END, "stopped by you")


def test_the_interrupt_button_does_as_stop_does(lab: NotebookPage, new_run: NewRun) -> None:
    lab.start(WAITING)
    run = new_run()
    pids = run.met(2)
    lab.interrupt()
    run.ended_by_user(pids)
    lab.finish(WAITING)
    expect(lab.state(WAITING)).to_have_attribute("data-state", "stopped")


LINE = "input.jp-Stdin-input"
ASKED = "rank 0 is waiting for input"


@pytest.mark.parametrize(
    "front_end", [LAB, pytest.param(NOTEBOOK, marks=pytest.mark.exhaustive)], ids=lambda f: f.name
)
def test_the_next_cell_runs_after_stop_took_a_question_back(
    open_tab: OpenTab, front_end: FrontEnd
) -> None:
    """The front end refuses cells while it waits for a line."""
    page = open_tab(front_end)
    page.start(ASKING_TOO_LONG)
    expect(page.cell(ASKING_TOO_LONG).locator(LINE)).to_be_visible()
    expect(page.widget(ASKING_TOO_LONG)).to_contain_text(ASKED)
    _stop(page, ASKING_TOO_LONG)
    page.finish(ASKING_TOO_LONG)
    _is_free(page)


def test_the_next_cell_runs_after_a_gang_failed_while_a_rank_asked(lab: NotebookPage) -> None:
    lab.start(ASKING_AS_A_PEER_FAILS)
    expect(lab.cell(ASKING_AS_A_PEER_FAILS).locator(LINE)).to_be_visible()
    lab.finish(ASKING_AS_A_PEER_FAILS)
    expect(lab.state(ASKING_AS_A_PEER_FAILS)).to_have_attribute("data-state", "failed")
    _is_free(lab)
