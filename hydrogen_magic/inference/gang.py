"""``%%infer`` over rows that this process reads: a gang whose ranks predict, here or on other machines."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import Any

from hydrogen_magic import plugins
from hydrogen_magic.capture import Captured
from hydrogen_magic.core.dropped_objects import when_dropped
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.inference import fingerprints, sources
from hydrogen_magic.inference.dispatcher import Dispatcher
from hydrogen_magic.inference.kept_parts import KeptParts
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.node.prediction.ddl import parse_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.transport import framing

_MAX_RANKS = framing.MAX_FDS - 1
"""Their channels are sent to the agent in one message, with the closure."""


def infer(
    frame: Any,
    captured: Captured,
    spec: JobSpec,
    options: InferOptions,
    *,
    title: str,
    target: str | os.PathLike[str] | None = None,
    resume: bool = False,
) -> InferenceRun:
    """Run the captured cell on ``spec.np`` ranks, then its ``predict`` over ``frame``.

    A captured cell defines ``predict``; a captured call returns it. ``target``: path of the predictions
    for Parquet data, see :func:`hydrogen_magic.inference.sources.source`. ``resume``: continue a run that
    kept its finished rows. Returns at once.

    Raises InferError for an unsupported frame, or if something changed since the run to resume, and
    PlacementError if the ranks cannot run; nothing was started then.
    """
    is_here = plugins.placement(spec.placement).on_this_machine
    if is_here and spec.np > _MAX_RANKS:
        raise PlacementError(f"`--np {spec.np}`: one machine supports at most {_MAX_RANKS} ranks")
    with ExitStack() as on_error:
        source = sources.source(frame, target)
        on_error.callback(sources.close, source)
        declared = [] if options.schema is None else parse_schema(options.schema).names
        options.check_names(declared, source.schema.names)
        result = source.result(options)
        columns = [(field.name, str(field.type)) for field in source.schema]
        cell = fingerprints.of_cell(captured)
        prints = {
            **cell,
            **fingerprints.of_options(options, spec.env),
            **fingerprints.of_columns(columns, source.n_rows),
            **fingerprints.of_attrs(source.attrs, captured),
        }
        kept = None
        if spec.session is None:  # otherwise the ranks may hold other values than those known here
            head = partial(_head, source, options.batch_size)
            until_used = spec.detach and result.target is None
            kept = KeptParts(prints, result.target, resume=resume, head=head, until_used=until_used)
        ranks = fingerprints.of_ranks(captured, cell)
        feed = Dispatcher(source, result, options, spec.np, ranks, kept, is_here=is_here)
        on_error.callback(feed.end, "FAILED")
        gang = launcher.launch_captured(captured, spec, title=title, feed=feed)
        on_error.pop_all()
    run = InferenceRun(gang, feed.use, feed.finished)
    if kept is not None and kept.until_used:
        when_dropped(run, kept.drop_result)
    return run


def _head(source: Any, batch_size: int) -> Any:
    """Return the first chunk; None if the source can be read only once."""
    if source.n_rows is None:
        return None
    chunks = source.chunks(batch_size)
    try:
        return next(chunks, None)
    finally:
        chunks.close()
