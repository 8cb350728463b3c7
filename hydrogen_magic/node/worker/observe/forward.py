"""Observer of forward passes: the outermost call of a module, whether DDP, FSDP, compiled or plain.

``Module.__call__`` is replaced only while recording: a model may call thousands of modules a step. Global
hooks would work too, but they warn under ``torch.compile``.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType, ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import span_recording
from hydrogen_magic.node.wrapping import transparent

_FORWARD, _LOSS = "forward", "loss"


class _Torch:
    """The observed class: ``_recording``, which replaces its method, cannot have a closure."""

    torch: Any = None
    module: Any = None
    """``torch.nn.Module``, once it is imported."""
    original: Any = None
    """Its original ``__call__``."""
    code: CodeType | None = None
    """The code object that identifies frames of it."""


_patched = _Torch()


def attach(module: ModuleType) -> None:
    """Remember the class; ``module`` is ``torch.nn.modules.module``."""
    original = module.Module.__call__
    _patched.code = original.__code__  # fails here, with a report, if torch has changed it
    _patched.torch, _patched.module = sys.modules["torch"], module.Module
    _patched.original = original


def follow(is_recording: bool) -> None:
    """Replace ``Module.__call__`` or restore it, if that is possible now; to be called repeatedly.

    Not during a forward pass, whose inner modules would look like the outermost one; and not while other
    code has replaced it temporarily, as ``torch.fx`` does.
    """
    module, original = _patched.module, _patched.original
    if module is None or not hasattr(_patched.torch, "compiler"):
        return  # torch is not imported, or only partly
    current = module.__call__
    if not is_recording:
        if current is _recording:
            module.__call__ = original
    elif current is original and not _is_main_thread_inside():
        module.__call__ = _recording


# No closure, and no outside state that changes: a model compiled during a recording stays compiled,
# since the compiler guards all objects that this function refers to.
@transparent
def _recording(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _patched.torch.compiler.is_compiling():  # must come first, as in recorded()
        return _patched.original(self, *args, **kwargs)
    if _FORWARD in span_recording.open_spans or _LOSS in span_recording.open_spans:
        return _patched.original(self, *args, **kwargs)
    name = _LOSS if type(self).__name__.endswith("Loss") else _FORWARD
    return span_recording.call(name, _patched.original, (self, *args), kwargs)


def _is_main_thread_inside() -> bool:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code is _patched.code:
            return True
        frame = frame.f_back
    return False
