"""The arguments of ``%%infer``: which frame, where its ranks run, and how to start them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.capture import Captured
from hydrogen_magic.core.job import Plan, Slot
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.placements.spark import forwarded_settings
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import sources
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.notebook.arguments import InferArguments
from hydrogen_magic.serialization.pickling_errors import describe

__all__ = ["frame", "plan", "start"]

_PATH_CHARACTERS = ("/", "*", ".")
_WRITERS = {
    "pandas": "scored.to_parquet(…)",
    "polars": "scored.write_parquet(…)",
    "arrow": "pyarrow.parquet.write_table(scored, …)",
    "spark": "scored.write.parquet(…)",
}
"""How to write each kind as Parquet."""


def frame(arguments: InferArguments, names: Mapping[str, Any]) -> Any:
    """Return the frame: a value of the notebook, or a path of Parquet data."""
    given = arguments.frame
    if given in names:
        return names[given]
    if any(character in given for character in _PATH_CHARACTERS):
        return given
    similar = difflib.get_close_matches(given, [name for name in names if name[:1] != "_"], n=3)
    hint = f"; similar names: {', '.join(similar)}" if similar else ""
    raise InferError(f"%%infer {given}: the notebook has no variable of this name{hint}")


def plan(given: Any, arguments: InferArguments) -> Plan:
    """Return where the ranks would run. Raises InferError if the frame cannot be sent there."""
    spec = arguments.spec
    _refuse_path(given, arguments)
    if sources.kind_of(given) == "spark":
        if arguments.has_placement and spec.placement != "spark":
            raise InferError(
                f"{arguments.frame} is a Spark DataFrame, so Spark predicts its rows: drop --on "
                f"{spec.placement}, or fetch them first with {arguments.frame}.toPandas()"
            )
        device = "assigned by Spark" if spec.gpu else None
        slot = Slot(0, 0, 0, 1, 1, 1, "Spark's executors", device)
        return Plan((slot,), forwarded=forwarded_settings.forwarded())
    if spec.placement == "spark":
        raise InferError(
            f"--on spark needs a Spark DataFrame: create one with "
            f"spark.createDataFrame({arguments.frame}), or use --on local"
        )
    return launcher.plan(spec)


def _refuse_path(given: Any, arguments: InferArguments) -> None:
    """Raise InferError for a path as the result of a frame that is not Parquet data."""
    writer = _WRITERS.get(sources.kind_of(given) or "")
    if arguments.target is not None and writer is not None:
        raise InferError(
            f"--out {arguments.target}: a path needs Parquet data as input, but {arguments.frame} is a"
            f" {describe(given)}. Use a variable, such as --out scored, and then {writer}"
        )


def start(given: Any, captured: Captured, arguments: InferArguments, title: str) -> InferenceRun:
    """Start to predict; a Spark DataFrame stays lazy if its result gets a name."""
    spec, options = arguments.spec, arguments.options
    if sources.kind_of(given) != "spark":
        from hydrogen_magic.inference.local import infer

        return infer(given, captured, spec, options, title=title, target=arguments.target)
    if arguments.out is None:
        from hydrogen_magic.inference.spark.gang import infer_on_spark

        return infer_on_spark(given, captured, spec, options, title=title)
    from hydrogen_magic.inference.spark.prepared import infer_spark

    with launcher.interrupts_raise():  # no gang runs its first batch
        frame = infer_spark(given, captured, spec, options)
    return InferenceRun(None, lambda: frame)
