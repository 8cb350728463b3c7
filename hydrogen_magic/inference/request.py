"""What a line of ``%%infer`` asks for: the frame it names, where its rows go, and what runs there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol

from hydrogen_magic.capture import Captured
from hydrogen_magic.core.job import Plan, Slot
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements.spark import forwarded_settings
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import sources
from hydrogen_magic.notebook.arguments import InferArguments
from hydrogen_magic.serialization.pickling_errors import describe

__all__ = ["StartedRun", "frame", "plan", "start"]

_LOOKS_LIKE_A_PATH = ("/", "*", ".")
_WRITERS = {
    "pandas": "scored.to_parquet(…)",
    "polars": "scored.write_parquet(…)",
    "arrow": "pyarrow.parquet.write_table(scored, …)",
    "spark": "scored.write.parquet(…)",
}
"""What writes each kind as Parquet."""


class StartedRun(Protocol):
    """What was started."""

    @property
    def gang(self) -> Gang | None:
        """Who predicts; None where nobody does before somebody asks for it."""
        ...

    @property
    def result(self) -> Any:
        """The frame with its predictions. Waits for the end; raises what went wrong."""
        ...


class _Lazy:
    """Predictions that Spark makes when somebody asks for them."""

    gang = None

    def __init__(self, frame: Any) -> None:
        self.result = frame


def frame(arguments: InferArguments, names: Mapping[str, Any]) -> Any:
    """Return the frame that the line means: a value of the notebook, or a path of Parquet data."""
    word = arguments.frame
    if word in names:
        return names[word]
    if any(sign in word for sign in _LOOKS_LIKE_A_PATH):
        return word
    near = difflib.get_close_matches(word, [name for name in names if name[:1] != "_"], n=3)
    hint = f"; similar names: {', '.join(near)}" if near else ""
    raise InferError(f"%%infer {word}: the notebook has no such name{hint}")


def plan(given: Any, arguments: InferArguments) -> Plan:
    """Return who would run where. Raises what says that the frame cannot go there."""
    spec = arguments.spec
    _refuse_path(given, arguments)
    if sources.kind_of(given) == "spark":
        if arguments.has_placement and spec.placement != "spark":
            raise InferError(
                f"{arguments.frame} is a Spark DataFrame and stays with Spark: drop --on "
                f"{spec.placement}, or take its rows first, as in {arguments.frame}.toPandas()"
            )
        device = "one assigned by Spark" if spec.gpu else None
        slot = Slot(0, 0, 0, 1, 1, 1, "Spark's executors", device)
        return Plan((slot,), forwarded=forwarded_settings.forwarded())
    if spec.placement == "spark":
        raise InferError(
            f"--on spark predicts over Spark DataFrames: make one, as in "
            f"spark.createDataFrame({arguments.frame}), or use --on local"
        )
    return launcher.plan(spec)


def _refuse_path(given: Any, arguments: InferArguments) -> None:
    """Raise InferError for a path as the place of what stays in memory, or on a cluster."""
    writer = _WRITERS.get(sources.kind_of(given) or "")
    if arguments.target is not None and writer is not None:
        raise InferError(
            f"--out {arguments.target} is a path, and only Parquet data is written to one:"
            f" {arguments.frame} is a {describe(given)}. Give the result a name, as in --out scored,"
            f" and write it then: {writer}"
        )


def start(given: Any, captured: Captured, arguments: InferArguments, title: str) -> StartedRun:
    """Start to predict over the frame; a Spark DataFrame with a name for the result stays lazy."""
    if sources.kind_of(given) == "spark":
        return _start_on_spark(given, captured, arguments, title)
    from hydrogen_magic.inference.local import infer

    return infer(
        given, captured, arguments.spec, arguments.options, title=title, target=arguments.target
    )


def _start_on_spark(
    given: Any, captured: Captured, arguments: InferArguments, title: str
) -> StartedRun:
    spec, options = arguments.spec, arguments.options
    if arguments.out is None:
        from hydrogen_magic.inference.spark.gang import infer_on_spark

        return infer_on_spark(given, captured, spec, options, title=title)
    from hydrogen_magic.inference.spark.prepared import infer_spark

    with launcher.interrupts_raise():  # its first batch may be run, by no gang
        return _Lazy(infer_spark(given, captured, spec, options))
