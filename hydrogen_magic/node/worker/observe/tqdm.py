"""Observer of tqdm: its bars become progress of the rank, which the views show instead of printing.

The class is patched, not replaced: subclasses, ``isinstance`` and pickling work as before. A bar that the
user sends to a file is printed there, and reported too.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_FILE_POSITION = 4
"""Position of ``file`` among the arguments of ``tqdm.__init__``, after ``self``."""


def attach(module: ModuleType) -> None:
    """Patch the bar of ``tqdm.std``, the base class of all other bars."""
    bar = module.tqdm
    bar.__init__ = _silent_init(bar.__init__)
    bar.display = _silent_display(bar.display)
    bar.close = _reporting_close(bar.close)
    bar.refresh = helpers.followed(bar.refresh, _report_open)


# ── the bar ──────────────────────────────────────────────────────────────────────────────────────


class _Silent:
    """Replaces one of the rank's own streams and discards all writes: views draw the bar."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _silent_init(original: Any) -> Any:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        is_positional = len(args) > _FILE_POSITION
        file = args[_FILE_POSITION] if is_positional else kwargs.get("file")
        file = sys.stderr if file is None else file
        if _reporter.current() is not None and helpers.is_own_stream(file):
            self._hydrogen_silent = True
            silent = _Silent(file)
            if is_positional:
                args = (*args[:_FILE_POSITION], silent, *args[_FILE_POSITION + 1 :])
            else:
                kwargs["file"] = silent
        original(self, *args, **kwargs)

    return __init__


def _silent_display(original: Any) -> Any:
    @wraps(original)
    def display(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Formatting is most of a bar's cost, and its result is not used here.
        if getattr(self, "_hydrogen_silent", False):
            return True
        return original(self, *args, **kwargs)

    return display


def _report_open(_: Any, bar: Any, /, *__: Any, **___: Any) -> None:
    if not bar.disable:
        _report(bar)


def _reporting_close(original: Any) -> Any:
    @wraps(original)
    def close(self: Any) -> None:
        # Called again by __del__, and for bars whose __init__ raised.
        was_open = not getattr(self, "disable", True)
        original(self)
        if was_open and hasattr(self, "_hydrogen_bar"):
            _report(self, closed=True)

    return close


def _report(bar: Any, closed: bool = False) -> None:
    reporter = _reporter.current()
    if reporter is None:
        return
    if not hasattr(bar, "_hydrogen_bar"):
        bar._hydrogen_bar = reporter.bars.new()
    try:
        n, total = float(bar.n), None if bar.total is None else float(bar.total)
    except (TypeError, ValueError, OverflowError):
        return  # the unit of its count is not a number
    desc = str(bar.desc or "").rstrip().removesuffix(":")
    postfix = f"[{bar.postfix}]" if bar.postfix else ""
    reporter.bars.update(
        bar._hydrogen_bar, f"{desc} {postfix}".strip(), n, total, str(bar.unit), closed
    )


def attach_to_rich(module: ModuleType) -> None:
    """Hide the ``rich.progress`` of ``tqdm.rich`` from its observer: the bar itself is reported."""
    bar = module.tqdm_rich
    for name in ("__init__", "display", "reset"):
        setattr(bar, name, helpers.claiming(getattr(bar, name)))
    # Other bars do so themselves.
    bar.__init__ = helpers.followed(bar.__init__, lambda _, bar, /, *__, **___: bar.refresh())


# ── tqdm.notebook ────────────────────────────────────────────────────────────────────────────────


def attach_to_notebook(module: ModuleType) -> None:
    """Replace the bar of ``tqdm.notebook`` by the ordinary one: a rank has no notebook for widgets."""
    from tqdm import std

    class tqdm_notebook(std.tqdm):  # type: ignore[misc]  # noqa: N801  tqdm's name
        """``tqdm.notebook.tqdm`` on a rank."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    def tnrange(*args: Any, **kwargs: Any) -> Any:
        """Return ``tqdm(range(*args), **kwargs)``."""
        return tqdm_notebook(range(*args), **kwargs)

    for item in (tqdm_notebook, tnrange):
        item.__module__, item.__qualname__ = module.__name__, item.__name__
    vars(module).update(
        tqdm=tqdm_notebook,
        tqdm_notebook=tqdm_notebook,
        trange=tnrange,
        tnrange=tnrange,
        # tqdm.autonotebook reads these: there are no widgets.
        IProgress=None,
        WARN_NOIPYW="",
    )


def notebook_spec() -> ModuleSpec:
    """Return the spec of a ``tqdm.notebook`` that does not import ipywidgets."""
    return ModuleSpec("tqdm.notebook", _NotebookLoader())


class _NotebookLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        attach_to_notebook(module)
