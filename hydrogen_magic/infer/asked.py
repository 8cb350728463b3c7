"""What a line of ``%%infer`` asks for: the frame it names, where its rows go, and what runs there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol

from hydrogen_magic import runner
from hydrogen_magic.arguments import InferArguments
from hydrogen_magic.capture import Captured
from hydrogen_magic.errors import InferError
from hydrogen_magic.handle import Gang
from hydrogen_magic.infer import frames
from hydrogen_magic.spec import Plan, Slot

__all__ = ["Run", "frame", "plan", "start"]

_LOOKS_LIKE_A_PATH = ("/", "*", ".")


class Run(Protocol):
    """What was started."""

    @property
    def gang(self) -> Gang | None:
        """The ranks that predict; None where Spark's own tasks do."""
        ...

    @property
    def result(self) -> Any:
        """The frame with its predictions. Waits for the end; raises what went wrong."""
        ...


class _OnSpark:
    """Predictions that Spark makes."""

    gang = None

    def __init__(self, frame: Any, is_lazy: bool) -> None:
        self._frame = frame
        self._is_lazy = is_lazy

    @property
    def result(self) -> Any:
        from hydrogen_magic.infer.spark_run import SparkRun

        return self._frame if self._is_lazy else SparkRun(self._frame).result()


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
    if frames.kind_of(given) == "spark":
        if arguments.has_placement and spec.placement != "spark":
            raise InferError(
                f"{arguments.frame} is a Spark DataFrame and stays with Spark: drop --on "
                f"{spec.placement}, or take its rows first, as in {arguments.frame}.toPandas()"
            )
        device = "one that Spark gives" if spec.gpu else None
        return Plan((Slot(0, 0, 0, 1, 1, 1, "Spark's executors", device),))
    if spec.placement == "spark":
        raise InferError(
            f"--on spark predicts over Spark DataFrames: make one, as in "
            f"spark.createDataFrame({arguments.frame}), or use --on local"
        )
    return runner.plan(spec)


def start(given: Any, captured: Captured, arguments: InferArguments, title: str) -> Run:
    """Start to predict over the frame; a Spark DataFrame with a name for the result stays lazy."""
    if frames.kind_of(given) == "spark":
        from hydrogen_magic.infer.on_spark import infer_spark

        predicted = infer_spark(given, captured, arguments.spec, arguments.options)
        return _OnSpark(predicted, is_lazy=arguments.out is not None)
    from hydrogen_magic.infer.run import infer

    return infer(given, captured, arguments.spec, arguments.options, title=title)
