"""Distinguishes a rank that still works after its cell from a rank that hangs.

Packing a large result, an asynchronous checkpoint or an upload may take minutes. A rank that uses no
CPU time, writes nothing and sends nothing makes no progress, unless it waits for the answer of a server.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from hydrogen_magic.core import processes
from hydrogen_magic.core.units import clipped, counted, first_of

_IDLE_PACKING_S = 600.0
"""Limit while results are pending: ``__getstate__`` may wait for a server, a sharded tensor for a
slow rank."""
_IDLE_EXIT_S = 4.0
"""Limit after the results have arrived, for exit handlers and threads. Checked once a second: 5 s in all."""
_BUSY_EXIT_S = 60.0
"""A thread that computes without writing anything does no work for the user. An upload may wait that long for
its server's answer."""
_STORAGE_S = 600.0
"""How long a thread may wait for a disk, as in ``fsync``: a file server that is gone never answers."""
_LONG_STEP_S = 1.0
"""Packing a result that takes longer is reported: a user's ``__getstate__`` may compute for minutes."""
_MOST_THREADS = 4
"""Threads that a message names."""
_LONGEST_NAME = 60
_REMEDY = "in the cell, join it or shut its pool down, or make it a daemon thread"
_BUSY_TICKS = 5
"""CPU ticks per check of the processes; a thread with fewer is only polling."""


class FinishWatch:
    """Follows the end of one rank: watches it and its children after the end of its cell."""

    def __init__(self, pid: int) -> None:
        self.step = ""
        """The current step of sending the results, such as "packing `model`"."""
        self.threads: Sequence[str] = ()
        """Names of the threads that its exit waits for."""
        self.is_on_one_host = True
        """So is the whole gang. Connections to its ranks elsewhere look like those to a server."""
        self._pid = pid
        self._is_watching = self._has_delivered = False
        self._ticks = self._written = 0
        self._busy_s = self._wrote_s = self._moved_s = self._step_since_s = 0.0

    def begin(self) -> None:
        """The cell is over."""
        if not self._is_watching:
            self._is_watching = True
            self._busy_s = self._wrote_s = self._moved_s = time.monotonic()

    def pack(self, step: str) -> None:
        """The rank begins a step of sending its results."""
        self.step, self._step_since_s = step, time.monotonic()

    def delivered(self) -> None:
        """All results have arrived here."""
        self.step = ""
        self._has_delivered = True
        self._busy_s = self._wrote_s = time.monotonic()

    def slow_step(self) -> str:
        """Return a step that takes long, once; otherwise an empty text."""
        if not self.step or time.monotonic() - self._step_since_s <= _LONG_STEP_S:
            return ""
        self._step_since_s = math.inf
        return self.step

    def hang(self) -> str:
        """Return why the process has to be killed, once; empty if it may continue."""
        if not self._is_watching:
            return ""
        now_s = time.monotonic()
        ticks, written = _usage(self._pid)
        if written != self._written or processes.is_sending(processes.family(self._pid)):
            self._written, self._moved_s = written, now_s
            self._wrote_s = self._busy_s = now_s
        elif now_s - self._moved_s < _STORAGE_S and self._is_in_storage():
            self._wrote_s = self._busy_s = now_s
        if abs(ticks - self._ticks) >= _BUSY_TICKS:  # fewer if a child has exited
            self._busy_s = now_s
        self._ticks = ticks
        why = self._verdict(now_s)
        self._is_watching = not why
        return why

    def _verdict(self, now_s: float) -> str:
        idle_s, silent_s = now_s - self._busy_s, now_s - self._wrote_s
        if not self._has_delivered:
            return f"packed no results for {idle_s:.0f} s" if idle_s > _IDLE_PACKING_S else ""
        if idle_s > _IDLE_EXIT_S and not self._may_wait_for_answer():
            return f"did not exit within {_IDLE_EXIT_S + 1:.0f} s of its result{self._cause}"
        if silent_s > _BUSY_EXIT_S:
            what = f"was still computing or waiting for an answer {_BUSY_EXIT_S:.0f} s after its result"
            return f"{what}{self._cause}"
        return ""

    @property
    def _cause(self) -> str:
        """Which threads still run, and what to do about that, in brackets; empty without one."""
        if not self.threads:
            return ""
        names = first_of((clipped(name, _LONGEST_NAME) for name in self.threads), _MOST_THREADS)
        return f" ({counted(len(self.threads), 'thread')} still running: {names}; {_REMEDY})"

    def _is_in_storage(self) -> bool:
        return processes.is_in_storage(processes.family(self._pid))

    def _may_wait_for_answer(self) -> bool:
        """Whether it has a connection to a server; those to processes of this agent keep nothing alive."""
        own, spare = processes.family(self._pid), processes.family(os.getpid())
        return self.is_on_one_host and processes.are_connected(own, spare)


def _usage(pid: int) -> tuple[int, int]:
    """Return the CPU ticks that a process and its descendants have used, and the bytes they wrote."""
    found = list(processes.processes(processes.family(pid)))
    return sum(one.cpu_ticks for one in found), sum(_written(one.pid) for one in found)


def _written(pid: int) -> int:
    """Return the bytes that a process has written by ``write``, not ``send``; 0 if unknown."""
    lines = processes.read(f"/proc/{pid}/io").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"wchar:")), 0)
