"""Shells of IPython in this process."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from hydrogen_magic.node.worker import settings
from hydrogen_magic.notebook import extension
from hydrogen_magic.serialization.closure import Setting


@contextmanager
def loaded_shell() -> Iterator[InteractiveShell]:
    """A shell with the magics; its history is in memory, so that no thread writes it."""
    main = sys.modules["__main__"]  # the shell replaces it
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    extension.load(shell)
    try:
        with settings_restored():
            yield shell
    finally:
        extension.unload(shell)
        shell.user_ns.clear()
        forget(shell)
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main


@contextmanager
def settings_restored() -> Iterator[None]:
    """Fail if libraries are left with other settings, which later tests would send to their ranks."""
    before = _settings()
    yield
    changed = _settings() ^ before
    assert not changed, f"the test must restore {sorted(changed)}"


def _settings() -> set[str]:
    """Return the labels of settings that differ from the defaults, of libraries that few others change."""
    found = (one for one in settings.read() if isinstance(one, Setting))
    return {one.label for one in found if one.provider not in _CHANGED_BY_LIBRARIES}


_CHANGED_BY_LIBRARIES = ("logging", "warnings")


def forget(shell: InteractiveShell) -> None:
    """Keep Python from resetting a shell when it exits.

    IPython collects all garbage then, which takes a tenth of a second beside torch, once for each of
    hundreds of shells.
    """
    atexit.unregister(shell.atexit_operations)
