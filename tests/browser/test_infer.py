"""``%%infer`` in JupyterLab: rows are seen to be done, and Stop ends it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from hydrogen_magic import events as ev
from tests.browser.conftest import NewRun
from tests.browser.gangs import NEXT
from tests.browser.tabs import Tabs
from tests.jupyter import alive, gone_within

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

GONE_S = 1.0
"""From the click to the end of the last process."""

FRAME = """import time
import pandas as pd
pixels = pd.DataFrame({"x": range(2400)})"""

PREDICT = """%%infer pixels --np 2 --batch-size 1 --out scored
def predict(batch):
    time.sleep(0.02)
    return {"twice": batch["x"] * 2}
"""
"""Takes 24 s, of which the first rows come back after 3."""


def test_rows_are_seen_to_be_done_until_stop_is_clicked(tabs: Tabs, new_run: NewRun) -> None:
    page = tabs.open(FRAME, PREDICT, NEXT)
    page.run(FRAME)
    page.start(PREDICT)
    run = new_run()
    widget = page.widget(PREDICT)
    figures = widget.locator(".hm-rows-figures")
    expect(figures).to_contain_text(re.compile(r"[1-9]\d* of 2,400 rows.*rows/s.*~.* left"))
    expect(widget.locator(".hm-ranks thead")).to_contain_text("rows/s")
    seen = figures.inner_text()
    expect(figures).not_to_have_text(seen, use_inner_text=True)

    pids = [started.pid for started in run.all(ev.RankStarted)]
    assert len(alive(pids)) == 2 and page.is_running(PREDICT)
    widget.locator(".hm-stop").click()
    assert gone_within(pids, GONE_S)
    expect(page.state(PREDICT)).to_have_attribute("data-state", "stopped")
    expect(figures).to_contain_text(re.compile(r"[1-9][\d,]* of 2,400 rows"))
    expect(figures).not_to_contain_text("left")
    page.finish(PREDICT)
    page.shows(PREDICT, "stopped by you")
    page.run(NEXT)
    page.shows(NEXT, "42")
