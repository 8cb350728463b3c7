"""Observer of backward passes: ``torch.autograd.backward``, which ``Tensor.backward`` also calls.

DDP reduces gradients while autograd computes others. At the end, a final callback of the backward pass
waits in C++ for the remaining reductions. Our own callback, queued first, marks where that wait begins: the
time before is the rank's own work, the time after belongs to all ranks. There is no wrapper between DDP and
its process group, so results and speed do not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

from hydrogen_magic.core.events import GRADIENTS
from hydrogen_magic.node.worker.observe import span_recording
from hydrogen_magic.node.worker.observe.helpers import followed
from hydrogen_magic.node.worker.reporting.spans import depth
from hydrogen_magic.node.wrapping import wraps

_NAME = "backward"
_LEAST_NS = 50_000
"""Duration of the final callback if every gradient has been reduced by then."""

_models: WeakSet[Any] = WeakSet()
"""Instances of DDP."""


def attach(module: ModuleType) -> None:
    """Record the outermost backward passes; ``module`` is ``torch.autograd``."""
    torch = sys.modules["torch"]  # only partly imported: nothing of it may be used yet
    module.backward = _recording(torch, module.backward)  # type: ignore[attr-defined]


def attach_to_ddp(module: ModuleType) -> None:
    """Remember the models that DDP creates; ``module`` is ``torch.nn.parallel.distributed``."""
    ddp = module.DistributedDataParallel
    ddp.__init__ = followed(ddp.__init__, lambda _, model, /, *__, **___: _models.add(model))


def _recording(torch: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # must come first, as in recorded()
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
                reporter.span(GRADIENTS, computed_ns, end_ns, depth.spans)

    return backward


def _when_computed(torch: Any, roots: Any, call: Callable[[], None]) -> Any:
    """Make autograd call a hook when it has computed all gradients of ``roots``; return it for removal.

    None without DDP, or with a communication hook of the user, whose work cannot be distinguished from
    waiting.
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
    """Return whether DDP's default reducer reduces the gradients among all ranks."""
    models = list(_models)
    if not models or not sys.modules["torch.distributed"].is_initialized():
        return False
    return all(_is_plain(model) for model in models)


def _is_plain(model: Any) -> bool:
    world = sys.modules["torch.distributed"]
    hooks = getattr(model, "_comm_hooks", ())
    return not hooks and model.process_group.size() == world.get_world_size()
