"""The start and the end of each rank."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import pytest

from hydrogen_magic.node.worker import main, process_setup
from hydrogen_magic.node.worker.interactive import figures


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
