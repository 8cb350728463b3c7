"""The agent without a kernel: what it does between a session and the next gang, and at the kernel's end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from hydrogen_magic.core import processes
from hydrogen_magic.core.messages import EndSession
from hydrogen_magic.node.agent import forkserver, server
from hydrogen_magic.node.agent.kernel_link import LocalLink
from hydrogen_magic.node.agent.server import AgentServer
from hydrogen_magic.node.agent.worker_reuse import RetainedWorkers
from hydrogen_magic.transport.background_tasks import BackgroundTasks


class LonelyAgent(AgentServer):
    """An agent without a kernel and children, which keeps the ranks of a session."""

    def __init__(self) -> None:
        self._retained = RetainedWorkers(lambda key, rank: None)
        self._retained.hold("session", {})
        self._pool: Any = None
        self._group = self._preparing = self._cleaning = None
        self._prepared_service = None
        self._kernel_link: Any = SimpleNamespace(localized=lambda request: request)
        self._tasks = BackgroundTasks()

    def _reap(self) -> None:
        pass

    async def _serve(self, group: object, request: object) -> None:
        pass


def test_a_gang_is_launched_while_an_ended_session_is_cleaned_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of its processes does not exit, and each descendant is killed until it does."""
    is_cleaning, is_over = asyncio.Event(), asyncio.Event()

    async def end_descendants(*arguments: object) -> None:
        is_cleaning.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()

    async def launch_meanwhile() -> None:
        agent = LonelyAgent()
        agent._handle(EndSession("session"))
        await is_cleaning.wait()
        agent._launch(SimpleNamespace(service=None))  # type: ignore[arg-type]
        for _ in range(3):  # turns of the loop
            await asyncio.sleep(0)
        assert is_over.is_set()

    monkeypatch.setattr(server, "EXIT_S", 0.0)
    monkeypatch.setattr(server, "RankGroup", lambda *arguments: None)
    monkeypatch.setattr(processes, "end_descendants", end_descendants)
    asyncio.run(launch_meanwhile())


def test_the_forkserver_imports_only_what_a_from_import_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from tool_of_test import main` gets the function: the script of that name is never run by a rank."""
    package = tmp_path / "tool_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("def main(): pass")
    (package / "main.py").write_text("raise SystemExit('a script')")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tool_of_test", "tool_of_test.main", "tool_of_test.part"):
        forkserver._import(name)
    imported = {name for name in ("main", "part") if sys.modules.pop(f"tool_of_test.{name}", None)}
    del sys.modules["tool_of_test"]
    assert imported == {"part"}


def test_the_end_of_the_kernel_is_handled_once() -> None:
    """Its descriptor stays readable, while the ranks are ended."""

    async def run() -> None:
        link: Any = Mock(lost=AsyncMock())
        kernel_link = LocalLink("127.0.0.1", kernel, Mock())
        kernel_link.begin(link, over := Mock(), Mock())
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        assert over.call_count == link.clean_up_after_hub.call_count == 1
        kernel_link.close()

    kernel, other = os.pipe()
    os.close(other)
    asyncio.run(run())
