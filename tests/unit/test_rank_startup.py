"""What is left out of the start and the end of each rank."""

from __future__ import annotations

import atexit
import logging
import sys
import types

import pytest

from hydrogen_magic.core.messages import ObserverSpec
from hydrogen_magic.node.worker import main, observe

HOROVODS = "hydrogen_magic.frameworks.horovod.node.observe"


def test_our_observers_of_imported_libraries_are_imported_before_the_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, HOROVODS, raising=False)
    observe.import_ahead([ObserverSpec("not_imported", f"{HOROVODS}:attach")])
    assert HOROVODS not in sys.modules
    observe.import_ahead(
        [
            ObserverSpec("json", "theirs.observe:attach"),
            ObserverSpec("json", "hydrogen_magic.missing:attach"),
            ObserverSpec("json", f"{HOROVODS}:attach"),
        ]
    )
    assert HOROVODS in sys.modules and "theirs" not in sys.modules


@pytest.mark.parametrize(("level", "is_left_out"), [("WARNING", True), ("INFO", False)])
def test_times_of_compilation_are_written_for_a_logger_that_wants_them(
    level: str, is_left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamo = types.ModuleType("torch._dynamo.utils")
    dynamo.dump_compile_times = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, dynamo.__name__, dynamo)
    logger = logging.getLogger(dynamo.__name__)
    monkeypatch.setattr(logger, "level", getattr(logging, level))
    monkeypatch.setattr(logger, "_cache", {})
    left_out: list[object] = []
    monkeypatch.setattr(atexit, "unregister", left_out.append)
    main._skip_compile_times()
    assert left_out == ([print] if is_left_out else [])
