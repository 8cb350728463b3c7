"""Runs many closures on ranks: each in a process of its own."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import traceback
import types
import warnings
from pathlib import Path

from hydrogen_magic.node.worker import namespace
from hydrogen_magic.serialization import payload
from tests.cell_grammar import Outcome, outcome

__all__ = ["run_all"]

_LIMIT_S = 60
"""Of one closure; most take milliseconds, some import a library first."""


def run_all(folder: str, libraries: tuple[str, ...] = ()) -> dict[int, Outcome]:
    """Run this rank's part of the closures in the files ``0``, ``1``, … of a folder.

    Returns their outcomes by number. ``libraries``: those that take seconds to import, once for all.
    """
    for name in libraries:
        importlib.import_module(name)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    numbers = sorted(int(path.name) for path in Path(folder).iterdir())
    return {n: _in_a_child(Path(folder, str(n))) for n in numbers if n % size == rank}


def _in_a_child(file: Path) -> Outcome:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LIMIT_S)
            os.close(reader)
            answer = pickle.dumps(_run(file))
            with open(writer, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(answer) if answer else Outcome(f"ended with {status}", None, {})


def _run(file: Path) -> Outcome:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    warnings.simplefilter("ignore")
    try:
        with file.open("rb") as closure:
            loaded = namespace.load(payload.from_memfd(closure.fileno()))
    except Exception:  # of restoring any object
        return Outcome(traceback.format_exc(), None, {})
    return outcome(loaded.run, module.__dict__)
