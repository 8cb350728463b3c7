"""A notebook of IPython cells in this process, and ranks in another one to send closures to.

The other process has imported nothing of the notebook, so that whatever should have travelled and did
not is missed there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from hydrogen_magic.capture import Captured, CellText, capture_cell
from hydrogen_magic.driver.state.gang_results import RankResults
from hydrogen_magic.node.worker import namespace
from hydrogen_magic.serialization import payload, result_stream
from tests import shells

SERVER = """
import os, pathlib, socket, sys, traceback, types
import numpy, torch._dynamo  # which each optimizer would import in its rank
torch.set_num_threads(1)
from hydrogen_magic.serialization import payload, result_stream
from hydrogen_magic.node.worker import namespace
from hydrogen_magic.node.worker.results import results

def serve(request, closure):
    sys.path[:], here = eval(request.decode())
    os.chdir(here)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    answer, sent = {"error": None, "stdout": ""}, []
    try:
        loaded = namespace.load(payload.from_memfd(closure))
        answer["warnings"] = loaded.warnings
        value = loaded.run()
        results.deliver(loaded, value, True, lambda part, section, on_write: sent.append((part, section)))
    except BaseException as error:
        answer["error"] = "".join(traceback.format_exception(error))
    sys.stdout.flush()
    answer["modules"] = [name for name in ("IPython", "pandas", "zmq") if name in sys.modules]
    return answer, sent

control = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
    if not message:
        break
    path, _, request = message.partition(b"\\0")
    closure, output = fds
    pid = os.fork()
    if pid == 0:
        control.close()
        os.dup2(output, 1)
        answer, sent = serve(request, closure)
        with open(output, "ab") as file:
            file.write(b"\\0" + repr(answer).encode())
        result_stream.save(sent, pathlib.Path(path.decode()))
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(closure); os.close(output)
    control.send(b"done")
"""


class RankError(Exception):
    """What a rank raised: its traceback as text."""


class Rank:
    """What a rank answered."""

    def __init__(self, stdout: str, answer: dict[str, Any], results: RankResults) -> None:
        self.stdout = stdout
        self.warnings: list[str] = answer.get("warnings", [])
        self.modules: list[str] = answer["modules"]
        self.out = results.variables()
        self._results = results

    @property
    def value(self) -> Any:
        return self._results.value()


class Ranks:
    """A process that imported torch and forks a rank per closure."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.control, theirs = socket.socketpair()
        fd = theirs.fileno()
        root = str(Path(__file__).parent.parent)
        temporary = str(self.folder)  # with what ranks leave there: they exit without clean-up
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(fd)],
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": root, "TMPDIR": temporary},
        )
        theirs.close()

    def run(self, captured: Captured) -> Rank:
        """Run a closure; raise RankError with the rank's traceback when it fails."""
        closure = payload.to_memfd(captured.payload)
        output = os.memfd_create("output")
        try:
            request = repr((sys.path, os.getcwd())).encode()
            path = self.folder / "results"
            message = str(path).encode() + b"\0" + request
            socket.send_fds(self.control, [message], [closure, output])
            assert self.control.recv(4) == b"done"
            size = os.fstat(output).st_size
            text, _, tail = os.pread(output, size, 0).rpartition(b"\0")
            answer = eval(tail.decode())
            if answer["error"]:
                raise RankError(answer["error"])
            return Rank(text.decode(), answer, RankResults(0, result_stream.load(path)))
        finally:
            os.close(closure)
            os.close(output)

    def close(self) -> None:
        self.control.close()
        self.process.wait(60)
        shutil.rmtree(self.folder)


class Notebook:
    """Cells of a real IPython shell whose namespace is this process's ``__main__``."""

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        self.module = types.ModuleType("__main__")
        self.shell = InteractiveShell(config=config, user_module=self.module)
        self.history: list[str] = []

    @property
    def names(self) -> dict[str, Any]:
        return self.shell.user_ns

    def cell(self, text: str) -> None:
        """Run a cell in the kernel."""
        source = textwrap.dedent(text).strip("\n")
        self.shell.run_cell(source, store_history=True).raise_error()
        self.history += [source, self.shell.transform_cell(source)]

    def capture(self, text: str, **options: Any) -> Captured:
        """Capture a cell that a magic line precedes."""
        body = textwrap.dedent(text).strip("\n") + "\n"
        cell = CellText(body, "<cell 9>", "Cell In[9]", 2, self.shell.transform_cell)
        return capture_cell(cell, self.names, self.history, **options)


def inline(captured: Captured) -> Any:
    """Run a closure in this process, in a module of its own, and return its value."""
    return namespace.load(as_sent(captured), types.ModuleType("__main__")).run()


def as_sent(captured: Captured) -> payload.Payload:
    """Return a closure whose arrays are independent of the notebook's, as a rank gets it."""
    fd = payload.to_memfd(captured.payload)
    try:
        return payload.from_memfd(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_notebook() -> Iterator[Notebook]:
    """A notebook that is ``__main__`` until the block ends."""
    before = sys.modules["__main__"]
    hooks = sys.displayhook, sys.excepthook
    path, modules = list(sys.path), set(sys.modules)
    notebook = Notebook()
    sys.modules["__main__"] = notebook.module
    try:
        with shells.settings_restored(), warnings.catch_warnings():
            yield notebook
    finally:
        shells.forget(notebook.shell)
        sys.modules["__main__"] = before
        sys.displayhook, sys.excepthook = hooks
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if "pytest-" in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    """Write text files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
