"""``%%infer`` in JupyterLab: the view counts the rows that are done, and Stop ends it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from hydrogen_magic.core import events as ev
from tests.browser.conftest import NewRun
from tests.browser.gangs import FRAME, NEXT, PREDICT
from tests.browser.page import NotebookPage
from tests.gangs import alive

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]


def test_rows_are_counted_until_stop_is_clicked(lab: NotebookPage, new_run: NewRun) -> None:
    lab.run(FRAME)
    lab.start(PREDICT)
    run = new_run()
    widget = lab.widget(PREDICT)
    figures = widget.locator(".hm-rows-figures")
    expect(figures).to_contain_text(re.compile(r"[1-9]\d* of 24,000 rows.*rows/s.* left"))
    expect(widget.locator(".hm-ranks thead")).to_contain_text("rows/s")
    seen = figures.inner_text()
    expect(figures).not_to_have_text(seen, use_inner_text=True)

    pids = [started.pid for started in run.all(ev.RankStarted)]
    assert len(alive(pids)) == 2 and lab.is_running(PREDICT)
    widget.locator(".hm-stop").click()
    run.ended_by_user(pids)
    expect(lab.state(PREDICT)).to_have_attribute("data-state", "stopped")
    expect(figures).to_contain_text(re.compile(r"[1-9][\d,]* of 24,000 rows"))
    expect(figures).not_to_contain_text("left")
    lab.finish(PREDICT)
    lab.shows(PREDICT, "stopped by you")
    lab.run(NEXT)
    lab.shows(NEXT, "42")
