"""Loads and unloads the magics, and restores those of others that they replace."""

from __future__ import annotations

import functools
import time
import warnings
from contextlib import suppress
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.core import run_log
from hydrogen_magic.driver import kernel_end
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.inference import fingerprints
from hydrogen_magic.notebook import outliving
from hydrogen_magic.notebook.magics import Distributed

_NAMES = [
    *((kind, name) for kind in ("line", "cell") for name in ("distributed", "gang")),
    ("cell", "infer"),
    ("line", "debug"),
]
"""Every kind and name of our magics."""
_EXTENDED = {("line", "debug")}
"""Of these, the ones that do what the replaced one does, too."""


def load(shell: InteractiveShell) -> None:
    """Register the magics; report replaced magics, and earlier runs that had to be stopped."""
    magic = Distributed(shell)
    magic.replaced = _magics_of_others(shell)
    for key, other in magic.replaced.items():
        if key in _EXTENDED:
            continue
        name = key[1]
        warnings.warn(
            f"hydrogen_magic replaces the %%{name} magic registered by {_module_of(other)}; "
            "%unload_ext hydrogen_magic restores it.",
            stacklevel=3,
        )
    shell.register_magics(magic)
    shell.events.register("pre_run_cell", magic.note_cell)
    shell.events.register("post_run_cell", magic.get_ready)
    _end_before_other_processes(getattr(shell, "kernel", None), magic)
    _report_stopped_runs()
    for line in outliving.attachable_lines():
        print(line)
    run_log.prune()  # when all are reported


def unload(shell: InteractiveShell) -> None:
    """Remove the magics and restore the replaced ones. Gangs continue."""
    registered = shell.magics_manager.magics
    for kind, name in _NAMES:
        if _is_ours(registered[kind].get(name)):
            del registered[kind][name]
    configurables: list[Any] = shell.configurables
    for magic in [each for each in configurables if isinstance(each, Distributed)]:
        for (kind, name), other in magic.replaced.items():
            registered[kind].setdefault(name, other)
        shell.events.unregister("pre_run_cell", magic.note_cell)
        with suppress(ValueError):
            shell.events.unregister("post_run_cell", magic.get_ready)
        configurables.remove(magic)
    shell.magics_manager.registry.pop("Distributed", None)
    vars(getattr(shell, "kernel", shell)).pop("do_shutdown", None)


def _end_before_other_processes(kernel: Any, magic: Distributed) -> None:
    """Have a kernel that is shut down end its gangs and delete its data at once.

    ipykernel waits for the notebook's other processes before it exits, such as Spark's JVM, and Jupyter
    kills it after some seconds: then exit handlers do not run.
    """
    shut_down = getattr(kernel, "do_shutdown", None)
    if shut_down is None:
        return

    @functools.wraps(shut_down)
    def do_shutdown(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        kernel_end.end_with_kernel()
        kernel_end.note_shutdown(began, magic.cell_began)
        folders.delete_all()
        return shut_down(*args, **kwargs)

    kernel.do_shutdown = do_shutdown


def _magics_of_others(shell: InteractiveShell) -> dict[tuple[str, str], Any]:
    find: Any = shell.find_magic  # which loads lazy ones
    there = {(kind, name): find(name, kind) for kind, name in _NAMES}
    return {key: magic for key, magic in there.items() if magic and not _is_ours(magic)}


def _is_ours(magic: Any) -> bool:
    return _module_of(magic).partition(".")[0] == "hydrogen_magic"


def _module_of(magic: Any) -> str:
    return str(getattr(magic, "__module__", "") or "")


def _report_stopped_runs() -> None:
    abandoned = kernel_end.clean_up_abandoned()
    for line in outliving.ended_lines(abandoned):
        print(line)
    stopped = [gang_id for gang_id in abandoned if not outliving.is_outliving(gang_id)]
    if stopped:
        runs = "1 earlier run was" if len(stopped) == 1 else f"{len(stopped)} earlier runs were"
        names = ", ".join(stopped[:5])
        print(f"{runs} stopped when the kernel ended: {names} (%gang show {stopped[0]})")
        if any(map(fingerprints.has_answers, stopped)):
            print("its finished rows are kept: run the %%infer cell with --resume to continue")
    for line in outliving.untaken_lines():
        print(line)
