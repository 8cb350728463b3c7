"""Exceptions of hydrogen_magic::

    HydrogenError           a RuntimeError, as in other launchers
    ├── CaptureError        the cell uses a name that is undefined, that cannot be sent, or that both the
    │   │                   notebook and the ranks of its session have changed; nothing was started
    │   └── CellSyntaxError the cell is not valid Python; shown as Python shows a SyntaxError
    ├── PlacementError      the ranks cannot run in the requested placement
    ├── RendezvousError     the ranks could not find each other
    ├── RankFailedError     a rank failed; the culprit, its traceback and its victims are named
    ├── ResultError         the ranks finished, but a result could not be sent, unpickled or assigned
    ├── GangStoppedError    the gang was stopped on request, or because its kernel, session or owner ended
    ├── GangTimeoutError    the gang was stopped at --timeout, or %gang wait reached its own --timeout
    ├── SweepError          runs of --sweep failed; the others have finished
    └── InferError          %%infer: this DataFrame, predict or its result is not supported

Wrong arguments of a magic are IPython's own ``UsageError``, whose traceback IPython hides. Wrong arguments of
a function are a TypeError or ValueError that a notebook shows as one line: OptionTypeError, OptionValueError.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

__all__ = [
    "CaptureError",
    "CellSyntaxError",
    "GangStoppedError",
    "GangTimeoutError",
    "HydrogenError",
    "InferError",
    "OptionTypeError",
    "OptionValueError",
    "PlacementError",
    "RankFailedError",
    "RendezvousError",
    "ResultError",
    "SweepError",
]


class HydrogenError(RuntimeError):
    """Base of all errors of this package.

    In a notebook it shows :attr:`report` without the frames between the magic and the raise, which
    are internal to this package. Elsewhere a traceback ends with it, from Python 3.11 on.
    """

    def __init__(self, message: str, *, report: str | None = None) -> None:
        super().__init__(message)
        self.report = report if report is not None else f"{type(self).__name__}: {message}"
        """The text that a notebook shows; several lines if the message alone is not enough."""
        more = self.report.removeprefix(message).strip("\n") if report is not None else ""
        if more and sys.version_info >= (3, 11):
            self.add_note(more)

    def _render_traceback_(self) -> list[str]:
        """IPython's hook for exceptions that print themselves."""
        return self.report.splitlines()


class CaptureError(HydrogenError):
    """A name is undefined, cannot be sent, or was changed by the notebook and by its session's ranks."""


class CellSyntaxError(CaptureError):
    """The cell is not valid Python."""


CellSyntaxError.__name__ = CellSyntaxError.__qualname__ = "SyntaxError"  # what front ends show


class PlacementError(HydrogenError):
    """The machine or cluster cannot run the ranks as requested."""


class RendezvousError(HydrogenError):
    """The ranks could not find each other."""


class RankFailedError(HydrogenError):
    """A rank failed and the gang was ended."""

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        report: str | None = None,
        gang: str = "",
        session: str | None = None,
    ) -> None:
        super().__init__(message, report=report)
        self.rank = rank
        """The culprit: the rank that failed first, which need not be the first one to raise."""
        self.gang = gang
        """The ID of its gang."""
        self.session = session
        """The name of its session, None without one."""

    def __reduce__(self) -> Any:  # Exception's own calls the class without its keyword
        return partial(type(self), rank=self.rank), self.args, self.__dict__


class ResultError(HydrogenError):
    """A result of a rank could not be sent to the notebook or unpickled there.

    Other results are not affected.
    """


class GangStoppedError(HydrogenError):
    """The gang was stopped before it finished.

    On request, because its kernel, session or owner process ended, or because the cell or script that waited
    for it failed.
    """


class GangTimeoutError(HydrogenError):
    """The gang was stopped because it reached ``--timeout``.

    ``%gang wait --timeout`` raises it, too, when its own time is over; the gang then continues.
    """


class SweepError(HydrogenError):
    """Some runs of a sweep failed; :func:`hydrogen_magic.last_sweep` has the results of the others."""


class InferError(HydrogenError):
    """``%%infer`` cannot work with a DataFrame, a ``predict`` function or its result.

    If certain rows caused the failure, the message names them, counted from 0; if ``predict``
    itself raised, its exception is the cause.
    """


class OptionTypeError(TypeError):
    """An argument of a function of this package has the wrong type."""

    def _render_traceback_(self) -> list[str]:
        return [f"TypeError: {self}"]


class OptionValueError(ValueError):
    """An argument of a function of this package has an invalid value."""

    def _render_traceback_(self) -> list[str]:
        return [f"ValueError: {self}"]
