"""The arguments of ``%%infer``: which frame, where its ranks run, and how to start them."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from hydrogen_magic.capture import Captured
from hydrogen_magic.core import syntax
from hydrogen_magic.core.job import Plan, Slot
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.interrupts import interrupts_raise
from hydrogen_magic.driver.placements.remote import forwarded_settings
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import sources
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.notebook.arguments.infer import InferArguments

_PATH_CHARACTERS = ("/", "*", ".")


def frame(arguments: InferArguments, names: Mapping[str, Any]) -> Any:
    """Return the frame: a value of the notebook, that of an expression, or a path of data."""
    given = arguments.frame
    if given in names:
        return names[given]
    if _is_expression(given, names):
        try:
            return eval(given, dict(names))
        except Exception as error:
            raise InferError(f"%%infer {given} raised {type(error).__name__}: {error}") from error
    if any(character in given for character in _PATH_CHARACTERS):
        return given
    similar = difflib.get_close_matches(given, [name for name in names if name[:1] != "_"], n=3)
    hint = f"; similar names: {', '.join(similar)}" if similar else ""
    if os.path.exists(given):
        hint = f"; for the file or folder {given}, write ./{given}"
    raise InferError(f"%%infer {given}: the notebook has no variable of this name{hint}")


def _is_expression(given: str, names: Mapping[str, Any]) -> bool:
    """Return whether this is an expression of a notebook's variable, and no existing path."""
    try:
        found: Any = syntax.parse(given, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(found, (ast.Subscript, ast.Call, ast.Attribute)) or os.path.exists(given):
        return False
    while not isinstance(found, ast.Name):
        found = next(ast.iter_child_nodes(found), None)
        if found is None:
            return False
    return found.id in names


def plan(given: Any, arguments: InferArguments) -> Plan:
    """Return where the ranks would run. Raises InferError if the frame cannot be sent there."""
    spec = arguments.spec
    kind = sources.kind_of(given)
    if arguments.target is not None and kind != "path":
        raise InferError(
            f"--out {arguments.target}: a path needs a path of data as input: use a variable, such as"
            " --out scored, and write it yourself"
        )
    if kind == "spark":
        if spec.session is not None:
            raise InferError(
                f"{arguments.frame} is a Spark DataFrame, so Spark's executors predict its rows: drop "
                f"--session, or fetch the rows first with {arguments.frame}.toPandas()"
            )
        for name, option in (("pack", "--pack and --spread"), ("wait_s", "--wait")):
            if name in arguments.given:
                raise InferError(
                    f"{arguments.frame} is a Spark DataFrame, whose tasks Spark itself places and queues:"
                    f" drop {option}"
                )
        if "placement" in arguments.given and spec.placement != "spark":
            raise InferError(
                f"{arguments.frame} is a Spark DataFrame, so Spark predicts its rows: drop --on "
                f"{spec.placement}, or fetch them first with {arguments.frame}.toPandas()"
            )
        device = "assigned by Spark" if spec.gpu else None
        slot = Slot(0, 0, 0, 1, 1, 1, "Spark's executors", device)
        return Plan((slot,), forwarded=forwarded_settings.forwarded())
    return launcher.plan(spec)


def _check_predict(captured: Captured, held: Collection[str] = ()) -> None:
    """Raise InferError if the cell does not define ``predict``, in whatever way.

    ``held``: names that the ranks of a session have.
    """
    assigned = captured.assigned
    if assigned is not None and "predict" not in {*assigned, *held}:
        raise InferError(
            "the cell defines no predict: add a function def predict(batch): …, or assign a model, as in"
            " predict = model"
        )


def start(given: Any, captured: Captured, arguments: InferArguments, title: str) -> InferenceRun:
    """Start to predict; a Spark DataFrame stays lazy if its result gets a name."""
    spec, options = arguments.spec, arguments.options
    _check_predict(captured, captured.session.held if captured.session else ())
    if sources.kind_of(given) != "spark":
        sources.require_pyarrow("%%infer")
        from hydrogen_magic.inference.gang import infer

        return infer(
            given,
            captured,
            spec,
            options,
            title=title,
            target=arguments.target,
            resume=arguments.resume,
        )
    if arguments.out is None:
        from hydrogen_magic.inference.spark.gang import infer_on_spark

        return infer_on_spark(given, captured, spec, options, title=title, resume=arguments.resume)
    from hydrogen_magic.inference.spark.prepared import infer_spark

    with interrupts_raise():  # no gang runs its first batch
        frame = infer_spark(given, captured, spec, options)
    return InferenceRun(None, lambda: frame)
