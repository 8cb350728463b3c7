"""Observer of compilation: by ``torch.compile``, and of extensions that a rank compiles on first use.

DeepSpeed's operators are such extensions. One process of a machine compiles; the others wait for a lock file
(``torch.utils.file_baton``), forever if the compiling process was killed.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_REMOVED_S = 2.0
"""A file is removed this long after it was closed, at most."""


def attach(module: ModuleType) -> None:
    """Show which extension is being compiled; ``module`` is ``torch.utils.cpp_extension``."""
    for name in ("load", "load_inline"):
        setattr(module, name, _shown(getattr(module, name)))
    explain_waits(module, functools.partial(_reporter.notice, "warning"))


def attach_to_dynamo(module: ModuleType) -> None:
    """Show when ``torch.compile`` compiles; ``module`` is ``torch._dynamo.callback``, a private one."""
    if hasattr(module, "on_compile_start"):
        module.on_compile_start(lambda *_: _show_activity("compiling (torch.compile)"))
        module.on_compile_end(lambda *_: _show_activity(""))


def explain_waits(module: ModuleType, say: Callable[[str], None]) -> None:
    """Call ``say`` with an explanation when this process waits for a lock file that was left behind.

    Since torch 2.15 none is: the operating system releases the lock of a process that has ended.
    """
    if not hasattr(module, "FileBaton"):
        return
    wait = module.FileBaton.wait

    @wraps(wait)
    def waiting(baton: Any) -> None:
        if _is_abandoned(Path(baton.lock_file_path)):
            text = f"waits for {baton.lock_file_path}, which no process of this machine has open"
            say(f"{text}: delete it, unless another machine is compiling the same extension")
        wait(baton)

    module.FileBaton.wait = waiting


def _shown(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def showing(name: str, *args: Any, **kwargs: Any) -> Any:
        _show_activity(f"compiling {name}")
        try:
            return load(name, *args, **kwargs)
        finally:
            _show_activity("")

    return showing


def _show_activity(text: str) -> None:
    """Show ``text`` beside the rank's phase."""
    reporter = _reporter.current()
    if reporter is not None:
        reporter.report(ev.RankPhase(reporter.now_s(), reporter.rank, reporter.phase, text))


def _is_abandoned(path: Path) -> bool:
    """Whether the file stays although no process that we may look into has it open.

    The process that compiles closes the file before it removes it.
    """
    if any(_has_open(pid, path) for pid in os.listdir("/proc") if pid.isdecimal()):
        return False
    time.sleep(_REMOVED_S)
    return path.exists()


def _has_open(pid: str, path: Path) -> bool:
    """Whether the process has the file open; False if it has exited, or we may not look into it."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if path.samefile(f"/proc/{pid}/fd/{fd}"):
                    return True
    return False
