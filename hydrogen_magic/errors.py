"""Every error that hydrogen_magic raises on purpose.

HydrogenError            a RuntimeError, as what other launchers raise
├── CaptureError        something the cell uses is undefined or cannot travel; nothing was started
├── PlacementError      the ranks cannot be put where they were asked to run; nothing was started
├── RendezvousError     the ranks could not find each other
├── RankFailedError     a rank failed; the culprit, its traceback and its victims are named
├── ResultError         the ranks finished, but a result could not be sent, opened or assigned
├── GangStoppedError    somebody asked the gang to stop (button, interrupt, ``%gang stop``)
├── GangTimeoutError    the gang ran longer than ``--timeout``
└── InferError          ``%%infer``: this frame, ``predict`` or what it returned is not what it takes

Wrong arguments of a magic are IPython's own ``UsageError``, whose traceback IPython hides.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "GangStoppedError",
    "GangTimeoutError",
    "HydrogenError",
    "InferError",
    "PlacementError",
    "RankFailedError",
    "RendezvousError",
    "ResultError",
]


class HydrogenError(RuntimeError):
    """Base of all errors of this package.

    In a notebook it shows :attr:`report`, not the frames between the magic and the raise: those
    are ours, and the user can do nothing with them.
    """

    def __init__(self, message: str, *, report: str | None = None) -> None:
        super().__init__(message)
        self.report = report if report is not None else f"{type(self).__name__}: {message}"
        """What a notebook shows; several lines where there is more to say than the message."""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook for exceptions that print themselves."""
        return self.report.splitlines()


class CaptureError(HydrogenError):
    """A name that the cell uses is undefined, or its value cannot travel to the ranks."""


class PlacementError(HydrogenError):
    """The machine or cluster cannot run the ranks as asked."""


class RendezvousError(HydrogenError):
    """The ranks could not be given a way to find each other."""


class RankFailedError(HydrogenError):
    """A rank failed and the gang was ended."""

    def __init__(self, message: str, *, rank: int, report: str | None = None) -> None:
        super().__init__(message, report=report)
        self.rank = rank
        """The culprit: the rank whose failure came first, not the one that complained first."""


class ResultError(HydrogenError):
    """A result of a rank could not be sent to the notebook or opened there.

    Results that arrived are not affected.
    """


class GangStoppedError(HydrogenError):
    """The gang was stopped on request before it finished."""


class GangTimeoutError(HydrogenError):
    """The gang was stopped because its time was up."""


class InferError(HydrogenError):
    """A frame, a ``predict`` or what it returned is not what ``%%infer`` can work with.

    Where rows are to blame the message names them, counted from 0; where ``predict`` itself raised,
    its exception is the cause.
    """
