"""The start and the end of each rank."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import threading
import types
from typing import Any

import pytest

from hydrogen_magic.core.messages import ObserverSpec
from hydrogen_magic.frameworks.horovod import node as horovods_node
from hydrogen_magic.node.worker import figures, main, observe, process_setup

HOROVODS = "hydrogen_magic.frameworks.horovod.node.observe"


def test_our_observers_of_imported_libraries_are_imported_before_the_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = importlib.import_module(HOROVODS)
    monkeypatch.setattr(horovods_node, "observe", observer)  # restored with the module
    monkeypatch.delitem(sys.modules, HOROVODS)
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


@pytest.mark.usefixtures("matplotlib")
def test_a_stopped_cell_leaves_no_figure_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    stop = threading.Event()
    stop.set()
    monkeypatch.setattr(process_setup, "asked_to_stop", stop)
    monkeypatch.setattr(figures, "_is_chosen", lambda: True)
    pyplot.figure()
    rank: Any = types.SimpleNamespace()
    assert main._Rank._fail(rank, KeyboardInterrupt()) == 130
    assert pyplot.get_fignums() == []


def test_a_child_that_the_cell_has_forked_does_not_wait_for_displays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are its parent's, and it has no thread that sends them."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    rank: Any = types.SimpleNamespace(
        pid=os.getppid(),
        session=None,
        infer_options=None,
        closure_fd=os.open(os.devnull, os.O_RDONLY),
        _loaded=types.SimpleNamespace(is_script=False, run=lambda: None),
        _enter=lambda phase: None,
        _show_displays=pytest.fail,
    )
    with pytest.raises(SystemExit):
        main._Rank._work(rank)
