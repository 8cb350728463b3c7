"""Shells of IPython in this process."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from hydrogen_magic.notebook import magics


@contextmanager
def loaded_shell() -> Iterator[InteractiveShell]:
    """A shell with the magics; its history is in memory, so that no thread writes it."""
    main = sys.modules["__main__"]  # the shell replaces it
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    magics.load(shell)
    try:
        yield shell
    finally:
        magics.unload(shell)
        shell.user_ns.clear()
        forget(shell)
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main


def forget(shell: InteractiveShell) -> None:
    """Keep Python from resetting a shell when it exits.

    IPython collects all garbage then, which takes a tenth of a second beside torch, once for each of
    hundreds of shells.
    """
    atexit.unregister(shell.atexit_operations)
