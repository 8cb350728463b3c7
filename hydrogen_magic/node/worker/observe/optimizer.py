"""Observer of optimizer steps, by torch's own hooks for all optimizers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker import reporter as _reporter
from hydrogen_magic.node.worker.observe import span_recording
from hydrogen_magic.node.worker.observe.helpers import Nesting

_STEP = "optimizer step"


_parts = Nesting()
with_parts = _parts.wrapping
"""Wraps a call; steps of optimizers inside of it count as parts of one step."""


def attach(module: ModuleType) -> None:
    """Count and record the steps of every optimizer; ``module`` is ``torch.optim.optimizer``.

    A step that ``GradScaler`` skips is neither taken nor counted.
    """
    torch = module.torch  # only partly imported: nothing of it may be used yet
    under_way: list[tuple[_reporter.Reporter, int, int]] = []
    """The step being recorded: reporter, optimizer, start."""

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _parts.depth or torch.compiler.is_compiling():
            return  # traced into the user's graph, our counters would recompile every step
        reporter = _reporter.current()
        if reporter is None or not reporter.is_recording:
            return
        if under_way and under_way[0][1] == id(optimizer):  # that step raised: no hook
            under_way.clear()
            span_recording.abandon(_STEP)
        if span_recording.begin(_STEP) is not None:
            # Without a step in which an earlier cell was stopped.
            under_way[:] = [(reporter, id(optimizer), reporter.now_ns())]

    def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if _parts.depth or torch.compiler.is_compiling():
            return
        if under_way and under_way[0][1] == id(optimizer):
            reporter, _, start_ns = under_way.pop()
            span_recording.end(reporter, _STEP, start_ns)
        current = _reporter.current()
        if current is not None:
            current.exchanges.note_step(optimizer)
            current.steps.add(id(optimizer))

    module.register_optimizer_step_pre_hook(before_step)
    module.register_optimizer_step_post_hook(on_step)
