"""Ranks that return arrays of NumPy, without torch. A plain local module: it travels whole."""

from __future__ import annotations

import atexit
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hydrogen_magic as hm

_PATIENCE_S = 60.0


def results(
    n: int, n_bytes: int, late_rank: int, late_s: float, folder: str, finishes: bool
) -> list[Any]:
    """Return ``n`` results, the last of which is large; one rank does so later than the other one.

    In ``folder``, ``packing-R`` says that rank R packs them, which it does once there is a file ``go``, and
    ``sent-R-NAME`` that it has sent one. It exits once there is a file ``end``. ``finishes``: an interrupt
    has it go on with all of that.
    """
    rank, notes = hm.rank(), Path(folder)
    if finishes:
        signal.signal(signal.SIGINT, lambda *_: (notes / "go").touch())
    _note_what_is_sent(notes, rank)
    atexit.register(_wait_for, notes / "end")
    if rank == late_rank:
        time.sleep(late_s)
    sizes = [*[100] * (n - 1), n_bytes]
    arrays = [result_of(rank, size) for size in sizes]
    return [_Result(array, notes / f"packing-{rank}", notes / "go") for array in arrays]


def result_of(rank: int, n_bytes: int) -> Any:
    """Return what arrives of a rank."""
    return np.resize(np.arange(rank, rank + 251, dtype=np.uint8), n_bytes)


class _Result:
    """Arrives as ``content``."""

    def __init__(self, content: Any, packing: Path, go: Path) -> None:
        self.content, self.packing, self.go = content, packing, go

    def __reduce__(self) -> Any:
        self.packing.touch()
        _wait_for(self.go)
        return np.asarray, (self.content,)


def _note_what_is_sent(notes: Path, number: int) -> None:
    from hydrogen_magic.core import messages as msg
    from hydrogen_magic.node.worker import main

    send = main._Rank._send

    def noted(rank: Any, message: Any, fds: Sequence[int] = ()) -> None:
        send(rank, message, fds)
        if isinstance(message, msg.ResultPart):
            (notes / f"sent-{number}-{message.name or '_'}").touch()

    main._Rank._send = noted  # type: ignore[assignment, method-assign]


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
