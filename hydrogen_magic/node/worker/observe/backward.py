"""Backward passes: ``torch.autograd.backward``, which ``Tensor.backward`` calls too.

DDP reduces gradients while autograd computes others, and at the end waits in C++ for what is not
reduced yet, in a final callback of the backward pass. A callback of our own, queued first, marks where
that wait begins: the time before is the rank's own work, the time after belongs to all ranks. Nothing is
put between DDP and its process group, so results and speed stay what they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

from hydrogen_magic.core.events import GRADIENTS
from hydrogen_magic.node.worker.observe import span_recording

__all__ = ["attach", "attach_to_ddp"]

_NAME = "backward"
_LEAST_NS = 50_000
"""What the final callback takes when every gradient has been reduced by then."""

_models: WeakSet[Any] = WeakSet()
"""Instances of DDP."""


def attach(module: ModuleType) -> None:
    """Record the outermost backward passes; ``module`` is ``torch.autograd``."""
    torch = sys.modules["torch"]  # only half imported as yet: nothing of it may be asked for now
    module.backward = _recording(torch, module.backward)  # type: ignore[attr-defined]


def attach_to_ddp(module: ModuleType) -> None:
    """Note the models that DDP makes; ``module`` is ``torch.nn.parallel.distributed``."""
    ddp = module.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _models.add(self)

    ddp.__init__ = init


def _recording(torch: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # first of all, as in recorded()
            return original(*args, **kwargs)
        reporter = span_recording.begin(_NAME)
        if reporter is None:
            return original(*args, **kwargs)
        start_ns, ends_ns = reporter.now_ns(), list[int]()
        hook = _when_computed(
            torch,
            args[0] if args else kwargs.get("tensors"),
            lambda: ends_ns.append(reporter.now_ns()),
        )
        try:
            return original(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
            end_ns = reporter.now_ns()
            computed_ns = ends_ns[-1] if ends_ns else end_ns
            if end_ns - computed_ns < _LEAST_NS:
                computed_ns = end_ns
            span_recording.end(reporter, _NAME, start_ns, computed_ns)
            if computed_ns < end_ns:
                reporter.span(GRADIENTS, computed_ns, end_ns, span_recording.depth.spans)

    return backward


def _when_computed(torch: Any, roots: Any, call: Callable[[], None]) -> Any:
    """Have autograd call when it has computed all gradients of ``roots``; return the hook to remove.

    None without DDP, or with a communication hook of the user's own, whose work cannot be
    distinguished from waiting.
    """
    if not _reduces_by_itself():
        return None
    candidates = roots if isinstance(roots, Sequence) else (roots,)
    root = next((each for each in candidates if getattr(each, "grad_fn", None) is not None), None)
    if root is None:
        return None
    engine = torch.autograd.Variable._execution_engine
    return root.register_hook(lambda gradient: engine.queue_callback(call))


def _reduces_by_itself() -> bool:
    """Tell whether gradients are reduced among all ranks by DDP's default reducer."""
    models = list(_models)
    if not models or not sys.modules["torch.distributed"].is_initialized():
        return False
    return all(_is_plain(model) for model in models)


def _is_plain(model: Any) -> bool:
    world = sys.modules["torch.distributed"]
    hooks = getattr(model, "_comm_hooks", ())
    return not hooks and model.process_group.size() == world.get_world_size()
