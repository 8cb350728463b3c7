"""Messages of a kernel that sends too many are dropped: what a page missed comes afterwards.

How many messages are dropped depends on the machine and on its load, and a server that is merely late
drops none. So the kernel itself drops all of them here, as its socket does when the server reads none.
"""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.browser.gangs import FLOOD, FLOODED
from tests.browser.page import NotebookPage, wait_until
from tests.browser.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]


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
    saved = lab.save(FLOODED, "text/html", "data:image/svg+xml;base64,")
    cells = json.loads(saved.read_text())["cells"]
    (outputs,) = (cell["outputs"] for cell in cells if "".join(cell["source"]) == FLOODED)
    assert [output["output_type"] for output in outputs] == ["display_data"], outputs
