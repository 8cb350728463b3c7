"""Forward passes: the outermost call of a module, be it DDP, FSDP, compiled or plain.

``Module.__call__`` is replaced while recording, and only then: a model may call thousands of modules
a step. Global hooks would do it too, but they warn under ``torch.compile``.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType, ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import span_recording

__all__ = ["attach", "follow"]

_FORWARD, _LOSS = "forward", "loss"

_torch: Any = None
_module: Any = None
"""``torch.nn.Module``, once it is there."""
_original: Any = None
"""Its ``__call__``."""
_code: CodeType | None = None
"""By which frames of it are known."""


def attach(module: ModuleType) -> None:
    """Take note of the class; ``module`` is ``torch.nn.modules.module``."""
    global _torch, _module, _original, _code
    original = module.Module.__call__
    _code = original.__code__  # fails here, and is told, where torch has it otherwise
    _torch, _module, _original = sys.modules["torch"], module.Module, original


def follow(is_recording: bool) -> None:
    """Replace ``Module.__call__`` or put it back, when it can be done now; to be called again.

    Not in the middle of a forward pass, whose inner modules would look like the outermost; and not
    while somebody else has replaced it for a while, as ``torch.fx`` does.
    """
    if _module is None or not hasattr(_torch, "compiler"):
        return  # torch is not there, or half imported
    current = _module.__call__
    if not is_recording:
        if current is _recording:
            _module.__call__ = _original
    elif current is _original and not _is_main_thread_inside():
        _module.__call__ = _recording


# No closure, and nothing from outside that changes: a model that is compiled while it is recorded
# is compiled for good, since the compiler guards what this function refers to.
def _recording(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _torch.compiler.is_compiling():  # first of all, as in recorded()
        return _original(self, *args, **kwargs)
    if _FORWARD in span_recording.open_spans or _LOSS in span_recording.open_spans:
        return _original(self, *args, **kwargs)
    name = _LOSS if type(self).__name__.endswith("Loss") else _FORWARD
    return span_recording.call(name, _original, (self, *args), kwargs)


def _is_main_thread_inside() -> bool:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code is _code:
            return True
        frame = frame.f_back
    return False
