"""``%%infer`` on this machine: a gang whose ranks predict, and the frame that comes of it."""

from __future__ import annotations

import os
from typing import Any

from hydrogen_magic.capture import Captured
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.inference import sources
from hydrogen_magic.inference.dispatcher import Feeder
from hydrogen_magic.node.prediction.ddl import parse_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.serialization import payload
from hydrogen_magic.transport import framing as wire_frames

__all__ = ["Inference", "infer"]

_MOST_RANKS = wire_frames.MAX_FDS - 1
"""Their channels reach the agent with one message, beside the closure."""


class Inference:
    """A run of ``%%infer`` in the user's hands."""

    def __init__(self, gang: Gang, feeder: Feeder) -> None:
        self.gang = gang
        """Its ranks: what to watch, to wait for and to stop."""
        self._feeder = feeder

    @property
    def result(self) -> Any:
        """The frame with its predictions, of the kind that was given.

        Waits for the end. Raises InferError for a frame, a ``predict`` or predictions that are not
        what they should be, and what :meth:`Gang.raise_for_state` raises.
        """
        self.gang.wait()
        self.gang.raise_for_state()
        return self._feeder.value

    def __repr__(self) -> str:
        return f"<Inference by {self.gang!r}>"


def infer(
    frame: Any,
    captured: Captured,
    spec: JobSpec,
    options: InferOptions,
    *,
    title: str,
    target: str | os.PathLike[str] | None = None,
) -> Inference:
    """Run what was captured on ``spec.np`` ranks here, then its ``predict`` over ``frame``.

    A captured cell defines ``predict``; a captured call returns it. ``target``: where predictions for
    Parquet data are written; see :func:`hydrogen_magic.inference.sources.source`. Returns at once.

    Raises InferError for what is no frame, PlacementError when the ranks cannot run as asked;
    nothing was started then.
    """
    if spec.np > _MOST_RANKS:
        raise PlacementError(f"`--np {spec.np}`: one machine takes {_MOST_RANKS} ranks at most")
    source = sources.source(frame, target)
    named = [] if options.schema is None else parse_schema(options.schema).names
    options.check_names(named, source.schema.names)
    result = source.result(options)
    feeder = Feeder(source, result, options, spec.np, payload.digest(captured.parcel))
    try:
        gang = launcher.launch_captured(captured, spec, title=title, feed=feeder)
    except BaseException:
        feeder.abandon()
        raise
    return Inference(gang, feeder)
