"""A gang that outlives its kernel, in JupyterLab: attached to after a restart, and stopped there."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import NewRun
from tests.browser.gangs import LOAD
from tests.browser.tabs import Tabs
from tests.browser.test_stop import STOP

pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("warm_agents"),
]

OUTLIVING = """%%distributed --np 2 --outlive --name night
import time
import hydrogen_magic as hm
for step in hm.track(range(10_000), desc="epoch"):
    hm.log(step=step, loss=1 / (step + 1))
    if step % 20 == 0:
        print("step", step, flush=True)
    time.sleep(0.1)
"""
ATTACH = "%gang attach night"


def test_the_live_view_comes_back_after_a_restart(tabs: Tabs, new_run: NewRun) -> None:
    page = tabs.open(OUTLIVING, ATTACH)
    page.run(OUTLIVING)
    expect(page.widget(OUTLIVING)).to_contain_text("step 20")
    page.restart_kernel()
    gang_id = new_run().id
    expect(page.state(OUTLIVING)).to_have_attribute("data-state", "no contact")
    expect(page.widget(OUTLIVING)).to_contain_text(
        f"The kernel was restarted. The gang does not end with its kernel: %gang attach {gang_id}"
    )
    expect(page.widget(OUTLIVING).locator(STOP)).to_have_attribute("aria-disabled", "true")
    page.run(LOAD)
    page.shows(LOAD, f"gang {gang_id} is still running (night, since ")
    page.run(ATTACH)
    expect(page.state(ATTACH)).to_have_attribute("data-state", "running")
    expect(page.widget(ATTACH)).to_contain_text("step 0")
    page.widget(ATTACH).locator(STOP).click()
    expect(page.state(ATTACH)).to_have_attribute("data-state", "stopped")
    page.close()


def test_a_gang_goes_on_when_its_tab_is_gone(tabs: Tabs) -> None:
    """And another notebook shows all of it, while the first one's kernel still has control."""
    training = OUTLIVING.replace("night", "evening")
    page = tabs.open(training)
    page.run(training)
    expect(page.widget(training)).to_contain_text("step 20")
    page.page.close()
    take = "%gang attach evening --take"
    other = tabs.open(take)
    other.run(take)
    expect(other.state(take)).to_have_attribute("data-state", "running")
    expect(other.widget(take)).to_contain_text("step 0")
    other.widget(take).locator(STOP).click()
    expect(other.state(take)).to_have_attribute("data-state", "stopped")
    page.close()
    other.close()
