"""A server drops messages of a kernel that sends too many: what a page lost comes afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.page import wait_until
from tests.browser.server import Server
from tests.browser.tabs import Tabs

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

OVER = "flood-is-over"
FLOOD = f"""import pathlib, threading, time
kernel = get_ipython().kernel
def flood():
    while not pathlib.Path("begin").exists():
        time.sleep(0.05)
    end_s = time.monotonic() + 9
    while time.monotonic() < end_s:
        for _ in range(80):
            kernel.session.send(kernel.iopub_socket, "comm_msg", {{"comm_id": "none", "data": {{}}}})
        time.sleep(0.01)
    pathlib.Path({OVER!r}).touch()
threading.Thread(target=flood, daemon=True).start()
"""
"""Thousands of messages a second, once the next cell is seen to run; the server takes 300."""
FLOODED = """%%distributed --np 2
import time
print("started", flush=True)
time.sleep(5)
print("finished", flush=True)
"""


def test_the_end_of_a_gang_is_shown_though_it_was_dropped(tabs: Tabs, server: Server) -> None:
    page = tabs.open(FLOOD, FLOODED)
    page.run(FLOOD)
    page.start(FLOODED)
    expect(page.widget(FLOODED)).to_contain_text("started")
    (server.notebooks / "begin").touch()
    wait_until((server.notebooks / OVER).exists, "the end of the flood")
    if "rate exceeded" not in server.log():
        pytest.skip("this machine is too busy to send more messages than the server takes")
    expect(page.state(FLOODED)).to_have_attribute("data-state", "done")
    expect(page.widget(FLOODED)).to_contain_text("finished")
    page.finish(FLOODED)
    saved: Path = page.save(FLOODED, "text/html", "data:image/svg+xml;base64,")
    assert "still running when this was saved" not in saved.read_text()
    page.close()
