"""What the classes of this room share: a call or a script as a gang, shown and waited for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydrogen_magic import capture, notebook, runner
from hydrogen_magic.spec import JobSpec
from hydrogen_magic.views import pick_view

__all__ = ["call", "run_script"]


def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    spec: JobSpec,
    *,
    launcher: str,
) -> Any:
    """Call ``function`` on every rank and return rank 0's value; ``launcher`` is who was asked to.

    Unlike :func:`hydrogen_magic.run` it leaves every keyword to the function. Raises what that does.
    """
    captured = capture.capture_call(
        function, args, kwargs,
        max_closure_bytes=spec.max_closure_bytes, ranks_have_gpu=runner.plan(spec).uses_gpu,
        labels=notebook.cell_labels_here(),
    )  # fmt: skip
    name = getattr(function, "__qualname__", repr(function))
    return _attended(captured, spec, f"{launcher}.run({name})")


def run_script(path: str, args: Sequence[str], spec: JobSpec, *, launcher: str) -> None:
    """Run a script with these arguments on every rank. Raises as :func:`call` does."""
    captured = capture.capture_script(path, args, as_module=False)
    _attended(captured, spec, f"{launcher}.run({os.path.basename(path)})")


def _attended(captured: capture.Captured, spec: JobSpec, title: str) -> Any:
    with runner.interrupts_held():
        gang = runner.launch_captured(captured, spec, title=title)
        runner.attend(gang, pick_view(actions=gang))
    return gang.result
