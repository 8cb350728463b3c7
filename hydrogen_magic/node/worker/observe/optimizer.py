"""Observer of optimizer steps, by torch's own hooks for all optimizers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import span_recording
from hydrogen_magic.node.worker.observe.helpers import Nesting, followed
from hydrogen_magic.node.worker.reporting import reporter as _reporter

_STEP = "optimizer step"
_under_way: list[tuple[_reporter.Reporter, int, int]] = []
"""The step being recorded: reporter, optimizer, start."""

_parts = Nesting()
with_parts = _parts.wrapping
"""Wraps a call; steps of optimizers inside of it are not counted: it takes one step, or none."""


def attach(module: ModuleType) -> None:
    """Count and record the steps of every optimizer; ``module`` is ``torch.optim.optimizer``.

    A step that ``GradScaler`` skips is neither taken nor counted.
    """
    torch = module.torch  # only partly imported: nothing of it may be used yet

    def hook(see: Callable[[Any], None]) -> Callable[[Any, Any, Any], None]:
        def sees(optimizer: Any, args: Any, kwargs: Any) -> None:
            # Traced into the user's graph, our counters would recompile every step.
            if not torch.compiler.is_compiling() and not _parts.depth:
                see(optimizer)

        return sees

    module.register_optimizer_step_pre_hook(hook(_begin))
    module.register_optimizer_step_post_hook(hook(_end))


def attach_to_zero(module: ModuleType) -> None:
    """Count the steps of DeepSpeed's ZeRO; ``module`` is ``stage_1_and_2`` or ``stage3``.

    ZeRO steps its optimizer once for each group of parameters, and not when gradients overflow.
    """
    for name in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        if (zero := vars(module).get(name)) is not None:
            zero.step = followed(with_parts(zero.step, _begin), _end_of_zero)
            # Earlier releases step here, with gradients of zero.
            zero.initialize_optimizer_states = with_parts(zero.initialize_optimizer_states)


def attach_to_state_dict(module: Any) -> None:
    """Leave out a step with gradients of zero; ``module`` is ``torch.distributed.checkpoint.state_dict``.

    It initializes the state of an optimizer that has not stepped, to save it or to load it.
    """
    module._init_optim_state = with_parts(module._init_optim_state)


def _begin(optimizer: Any, *_: Any, **__: Any) -> None:
    reporter = _reporter.current()
    if reporter is None or not reporter.is_recording:
        return
    if _under_way and _under_way[0][1] == id(optimizer):  # that step raised: no hook
        _abandon()
    if span_recording.begin(_STEP) is not None:
        # Without a step in which an earlier cell was stopped.
        _under_way[:] = [(reporter, id(optimizer), reporter.now_ns())]


def _end(optimizer: Any) -> None:
    if _under_way and _under_way[0][1] == id(optimizer):
        reporter, _, start_ns = _under_way.pop()
        span_recording.end(reporter, _STEP, start_ns)
    current = _reporter.current()
    if current is not None:
        current.exchanges.note_step(optimizer)
        current.steps.add(id(optimizer))


def _end_of_zero(_: None, optimizer: Any, *__: Any, **___: Any) -> None:
    if getattr(optimizer, "overflow", False):
        _abandon()
    else:
        _end(optimizer)


def _abandon() -> None:
    _under_way.clear()
    span_recording.abandon(_STEP)
