"""Messages of a kernel that sends too many are dropped: what a page missed comes afterwards.

How many messages a server drops depends on the machine and on its load, and one that is merely late drops
none. So in one test the kernel itself drops all of them, as its socket does when the server reads none. The
other sends a real flood. JupyterLab works through it in order, which may take a minute on a machine under
load, so the flood's end is where the page has read its last message. On two processors, that was up to 2.5 s
after the last of 1,000 messages a second, 5.3 s beside two busy loops, and 22 s beside more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from hydrogen_magic.core import events as ev
from tests.browser.conftest import NewRun
from tests.browser.gangs import FLOOD, FLOODED, NEXT
from tests.browser.page import NotebookPage, wait_until
from tests.browser.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

SENDING = """import pathlib, threading, time
def update(name, text):
    data, transient = {"text/plain": text}, {"display_id": name}
    get_ipython().display_pub.publish(data, transient=transient, update=True)
def send_many():
    until_s = time.monotonic() + 4
    while time.monotonic() < until_s or pathlib.Path("many").exists():
        for _ in range(80):
            update("nowhere", "")
        time.sleep(0.03)
    while not pathlib.Path("read").exists():
        update("flood", "the flood is over")
        time.sleep(0.5)
display({"text/plain": "the flood goes on"}, raw=True, display_id="flood")
threading.Thread(target=send_many).start()
"""
"""While there is a file ``many``, and for four seconds, a thread sends up to 2,600 messages a second. Some
number of them, instead of seconds, would take minutes on a machine under load."""
SHORT = """%%distributed --np 2
print("finished", flush=True)
"""
_RIGHT_WITHIN_S = 5.0
FINAL = "succeeded in "
"""Of the picture in a saved notebook."""


def check_saved(path: Path, code: str) -> list[str]:
    """Check that no output of a cell in a saved notebook is of a running gang; return the outputs' types."""
    cells = json.loads(path.read_text())["cells"]
    (outputs,) = (cell["outputs"] for cell in cells if "".join(cell["source"]) == code)
    assert "was running when" not in json.dumps(outputs)
    return [output["output_type"] for output in outputs]


@pytest.mark.exhaustive  # test_flood_watch has the parts
def test_first_and_last_messages_of_a_gang_are_shown_though_they_were_dropped(
    lab: NotebookPage, server: Server
) -> None:
    lab.run(FLOOD)
    flood = server.notebooks / "flood"
    flood.touch()
    lab.start(FLOODED)
    opening = server.notebooks / "opening-is-lost"
    wait_until(opening.exists, "a view whose opening is lost")
    expect(lab.widget(FLOODED)).to_have_count(0)
    late = server.notebooks / "late"
    late.touch()
    opening.unlink()
    flood.unlink()
    wait_until(opening.exists, "a repetition that is lost, too")
    late.unlink()
    expect(lab.state(FLOODED)).to_have_attribute("data-state", "running")
    expect(lab.widget(FLOODED)).to_contain_text("started")
    (server.notebooks / "is-flooded").unlink()
    flood.touch()
    wait_until((server.notebooks / "is-flooded").exists, "a dropped message")
    (server.notebooks / "go").touch()
    wait_until((server.notebooks / "end-is-lost").exists, "the end of the cell")
    assert lab.is_running(FLOODED)
    flood.unlink()
    expect(lab.state(FLOODED)).to_have_attribute("data-state", "done")
    expect(lab.widget(FLOODED)).to_contain_text("finished")
    lab.finish(FLOODED)
    types = check_saved(lab.save(FLOODED, "text/html", FINAL), FLOODED)
    assert types == ["display_data"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_loops", [0, 2], ids=["quiet", "busy"])
def test_page_and_saved_notebook_are_right_when_a_flood_was_read(
    n_loops: int, lab: NotebookPage, server: Server, new_run: NewRun
) -> None:
    lab.write(FLOODED, SENDING)
    lab.write(NEXT, SHORT)
    many, read = server.notebooks / "many", server.notebooks / "read"
    read.unlink(missing_ok=True)
    many.touch()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_loops)]
    try:
        lab.run(SENDING)
        lab.start(SHORT)
        new_run().wait_for(ev.GangEnded, bool)
        many.unlink()
        lab.shows(SENDING, "the flood is over")
        until_s = time.monotonic() + _RIGHT_WITHIN_S
        expect(lab.state(SHORT)).to_have_attribute(
            "data-state", "done", timeout=_RIGHT_WITHIN_S * 1000
        )
        check_saved(lab.save(SHORT, "text/html", FINAL, until_s - time.monotonic()), SHORT)
        expect(lab.widget(SHORT)).to_contain_text("finished")
        lab.finish(SHORT)
    finally:
        read.touch()
        many.unlink(missing_ok=True)
        for loop in loops:
            loop.kill()
            loop.wait()
        lab.write(SENDING, FLOODED)
        lab.write(SHORT, NEXT)
