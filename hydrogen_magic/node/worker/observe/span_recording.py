"""How a library's functions become spans while somebody wants them recorded.

Only the main thread is recorded, so that spans nest, and only the outermost of a name: what a
module's forward calls is that forward. While nobody wants it, a call costs a look at a flag.
Times are the host's: work that a GPU still has to do appears where the host waits for it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker import reporter as _reporter
from hydrogen_magic.node.worker.spans import depth

__all__ = ["abandon", "begin", "call", "depth", "end", "open_spans", "recorded", "replace"]

open_spans: set[str] = set()
"""Names of the spans that are open on the main thread."""


def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with its outermost calls recorded as ``name``."""
    torch = sys.modules["torch"]  # only half imported, perhaps: nothing of it may be asked for now

    @functools.wraps(original)
    def recording(*args: Any, **kwargs: Any) -> Any:
        # First of all: the compiler takes it for a constant, and what lies behind it is neither
        # traced nor a reason to compile again when it changes.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return call(name, original, args, kwargs)

    return recording


def call(
    name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``original``, and record it if that is wanted."""
    reporter = begin(name)
    if reporter is None:
        return original(*args, **kwargs)
    start_ns = reporter.now_ns()
    try:
        return original(*args, **kwargs)
    finally:
        end(reporter, name, start_ns)


def begin(name: str) -> _reporter.Reporter | None:
    """Open a span; None when it is not to be recorded (and there is nothing to end)."""
    reporter = _reporter.current()
    if reporter is None or not reporter.is_recording or name in open_spans:
        return None
    if threading.get_ident() != threading.main_thread().ident:
        return None
    open_spans.add(name)
    depth.spans += 1
    return reporter


def end(reporter: _reporter.Reporter, name: str, start_ns: int, end_ns: int | None = None) -> None:
    """Close a span and record it; ``end_ns``: when it ended, if not now."""
    abandon(name)
    reporter.span(name, start_ns, reporter.now_ns() if end_ns is None else end_ns, depth.spans)


def abandon(name: str) -> None:
    """Close a span without recording it."""
    open_spans.discard(name)
    depth.spans -= 1


def replace(module: ModuleType, exporter: str, spans: dict[str, str]) -> None:
    """Have functions of ``module`` (name -> span) recorded, also where ``exporter`` has them."""
    for name, span in spans.items():
        original = getattr(module, name, None)
        if original is None:
            continue  # older versions have not all of them
        wrapped = recorded(span, original)
        setattr(module, name, wrapped)
        exporting = sys.modules.get(exporter)
        if getattr(exporting, name, None) is original:
            setattr(exporting, name, wrapped)
