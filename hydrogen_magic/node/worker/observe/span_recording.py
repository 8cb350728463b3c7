"""Recording of a library's functions as spans.

Only the main thread is recorded, so that spans nest, and only the outermost call of each name: calls inside
of a module's forward belong to that forward. While recording is off, a call costs the check of a flag.
Times are those of the host: pending work of a GPU appears where the host waits for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.worker.reporting.spans import depth
from hydrogen_magic.node.wrapping import transparent, wraps

open_spans: set[str] = set()
"""Names of the open spans of the main thread."""


def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with its outermost calls recorded as ``name``."""
    torch = sys.modules["torch"]  # possibly only partly imported: nothing of it may be used yet

    @wraps(original)
    def recording(*args: Any, **kwargs: Any) -> Any:
        # Must come first: the compiler treats it as a constant, and neither traces the code behind
        # it nor recompiles when that changes.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return call(name, original, args, kwargs)

    return recording


@transparent
def call(
    name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``original``, and record it if recording is on."""
    reporter = begin(name)
    if reporter is None:
        return original(*args, **kwargs)
    start_ns = reporter.now_ns()
    try:
        return original(*args, **kwargs)
    finally:
        end(reporter, name, start_ns)


def begin(name: str) -> _reporter.Reporter | None:
    """Open a span; None if it is not recorded (and must not be closed)."""
    reporter = _reporter.current()
    if reporter is None or not reporter.is_recording or name in open_spans:
        return None
    if threading.get_ident() != threading.main_thread().ident:
        return None
    open_spans.add(name)
    depth.spans += 1
    return reporter


def end(reporter: _reporter.Reporter, name: str, start_ns: int, end_ns: int | None = None) -> None:
    """Close a span and record it; ``end_ns``: its end, if not now."""
    abandon(name)
    reporter.span(name, start_ns, reporter.now_ns() if end_ns is None else end_ns, depth.spans)


def abandon(name: str) -> None:
    """Close a span, if it is open, without recording it."""
    if name in open_spans:
        open_spans.discard(name)
        depth.spans -= 1


def abandon_all() -> None:
    """Close the spans that an earlier cell has left open; called on the main thread."""
    for name in tuple(open_spans):
        abandon(name)


def replace(module: ModuleType, exporter: str, spans: dict[str, str]) -> None:
    """Record functions of ``module`` (name -> span), also where ``exporter`` re-exports them."""
    for name, span in spans.items():
        original = getattr(module, name, None)
        if original is not None:  # older versions lack some of them
            put(module, exporter, name, recorded(span, original))


def put(module: ModuleType, exporter: str, name: str, wrapped: Callable[..., Any]) -> None:
    """Replace a function of ``module``, also where ``exporter`` re-exports it."""
    original = getattr(module, name)
    for place in (module, sys.modules.get(exporter)):
        if getattr(place, name, None) is original:
            setattr(place, name, wrapped)
