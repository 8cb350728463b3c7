"""Messages of a kernel that sends too many are dropped: what a page missed comes afterwards.

How many messages are dropped depends on the machine and on its load, and a server that is merely late
drops none. So the kernel itself drops all of them here, as its socket does when the server reads none.
"""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.browser.page import wait_until
from tests.browser.server import Server
from tests.browser.tabs import Tabs

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

FLOOD = """import pathlib
kernel = get_ipython().kernel
send = kernel.iopub_thread._really_send
def send_unless_flooded(message, *rest, **more):
    is_on, is_late = pathlib.Path("flood").exists(), pathlib.Path("late").exists()
    if not is_on and not is_late:
        return send(message, *rest, **more)
    kernel.session.message_count += 1000 * is_on
    parts = [bytes(part) for part in message]
    if is_late and b'"msg_type": "comm_open"' in b"".join(parts):
        pathlib.Path("opening-is-lost").touch()
    is_end = parts[-1] == b'{"execution_state": "idle"}' and b"execute_request" in parts[-3]
    pathlib.Path("end-is-lost" if is_end else "is-flooded").touch()
kernel.iopub_thread._really_send = send_unless_flooded
"""
"""As long as there is a file ``flood``, the kernel counts a thousand messages for each, and sends none. With
a file ``late`` it sends none either: the server has not read enough yet."""
FLOODED = """%%distributed --np 1
import pathlib, time
print("started", flush=True)
pathlib.Path("is-running").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
print("finished", flush=True)
"""


def test_first_and_last_messages_of_a_gang_are_shown_though_they_were_dropped(
    tabs: Tabs, server: Server
) -> None:
    page = tabs.open(FLOOD, FLOODED)
    page.run(FLOOD)
    flood = server.notebooks / "flood"
    flood.touch()
    page.start(FLOODED)
    wait_until((server.notebooks / "is-running").exists, "a running gang")
    expect(page.widget(FLOODED)).to_have_count(0)
    late = server.notebooks / "late"
    late.touch()
    flood.unlink()
    wait_until((server.notebooks / "opening-is-lost").exists, "a repetition that is lost, too")
    late.unlink()
    expect(page.state(FLOODED)).to_have_attribute("data-state", "running")
    expect(page.widget(FLOODED)).to_contain_text("started")
    (server.notebooks / "is-flooded").unlink()
    flood.touch()
    wait_until((server.notebooks / "is-flooded").exists, "a dropped message")
    (server.notebooks / "go").touch()
    wait_until((server.notebooks / "end-is-lost").exists, "the end of the cell")
    assert page.is_running(FLOODED)
    flood.unlink()
    expect(page.state(FLOODED)).to_have_attribute("data-state", "done")
    expect(page.widget(FLOODED)).to_contain_text("finished")
    page.finish(FLOODED)
    saved = page.save(FLOODED, "text/html", "data:image/svg+xml;base64,")
    outputs = json.loads(saved.read_text())["cells"][2]["outputs"]
    assert [output["output_type"] for output in outputs] == ["display_data"], outputs
    page.close()
