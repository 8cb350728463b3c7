"""The start and the end of each rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from typing import Any

import pytest

from hydrogen_magic.node.worker import main, process_setup
from hydrogen_magic.node.worker.interactive import figures
from hydrogen_magic.transport import framing


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


@pytest.mark.parametrize("how", ["announced", "of the cell", "of the cell after an ignored stop"])
def test_only_an_interrupt_that_the_agent_announces_is_a_stop(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell may send one to itself, and catch it: what it raises later is its failure."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(process_setup, "asked_to_stop", process_setup.StopRequest())
    agents, ours = framing.pair()
    ours.setblocking(False)
    with agents, ours:
        process_setup._handle_interrupts(ours.fileno())
        if how != "of the cell":
            agents.send(b"i")
        if how != "announced":
            process_setup.asked_to_stop.forget()  # before the next cell of a session
        handlers[signal.SIGINT](signal.SIGINT, None)
    assert process_setup.asked_to_stop.is_set() == (how == "announced")


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
