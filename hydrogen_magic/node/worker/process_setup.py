"""How a fork of the forkserver becomes an independent process, and then a rank of the notebook."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import os
import shutil
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.node.worker import spark_files, sparkdl

_IOLBF = 1
"""C's constant for line buffering."""

_WAITING_THREADS = 1
"""Threads per rank by default: several ranks share the cores."""

_default_threads = processes.usable_cores()
"""The libraries' own defaults."""


class StopRequest(threading.Event):
    """Set once the SIGINT of a stop has reached Python code; one of the cell itself is not a stop."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = -1
        """That of :class:`WorkerPipes`."""

    def note_interrupt(self) -> None:
        """Take a SIGINT for the stop if the agent has announced it, and answer."""
        with suppress(BlockingIOError):  # it has not
            os.read(self.socket, 1)
            self.set()
            os.write(self.socket, b"i")

    def forget(self) -> None:
        """Forget the stop of an earlier gang, of which the cell may have ignored the SIGINT."""
        self.clear()
        with suppress(BlockingIOError):  # it has not
            os.read(self.socket, 64)


asked_to_stop = StopRequest()

_interruptible: list[types.CodeType] = []


def let_interrupt(*functions: types.CodeType) -> None:
    """Let SIGINT raise KeyboardInterrupt while one of ``functions`` runs.

    At other times the signal only sets :data:`asked_to_stop`: a rank that reports the end of its cell must
    finish the report.
    """
    _interruptible.extend(functions)


class WorkerPipes(NamedTuple):
    """A worker's ends of the connections to its agent, as file descriptors."""

    control: int
    """Stream socket: ``go`` in, events and results out."""
    stdout: int
    stderr: int
    stop: int
    """Non-blocking socket: one byte in before the SIGINT of a stop, and one out when it reached Python code,
    so that the agent knows that the rank reacts."""
    stacks: int
    """Memory file that ``faulthandler`` writes to, when the agent asks for it, and at fatal signals."""


# ── becoming an independent process ──────────────────────────────────────────────────────────────


def detach(pipes: WorkerPipes, agent_pid: int, intermediate_pid: int) -> None:
    os.setsid()
    _wait_for_parent(agent_pid, intermediate_pid)
    processes.die_with_parent()
    if os.getppid() != agent_pid:
        os._exit(1)  # it died between the two lines above
    _pass_on_death()
    _disown_finalizers()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    faulthandler.enable(file=pipes.stacks, all_threads=True)
    faulthandler.register(processes.STACKS_SIGNAL, file=pipes.stacks, all_threads=True)
    _handle_interrupts(pipes.stop)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait_for_parent(agent_pid: int, intermediate_pid: int) -> None:
    """Wait until the intermediate process that forked us has exited and the agent is our parent.

    Parent-death signals refer to the parent at the time of the call, so an earlier one would fire now.
    """
    while (parent := os.getppid()) != agent_pid:
        if parent != intermediate_pid:
            os._exit(1)  # neither: the agent has died, and this process has no owner
        time.sleep(0.0002)


def _pass_on_death() -> None:
    """Set the signal for forked children (DataLoader workers) too: it is not inherited.

    Only for forks by the main thread: the signal follows the parent *thread*, and children of a short-lived
    thread would be killed at its end. The agent's final clean-up kills those.
    """
    by_main: list[bool] = [False]

    def before() -> None:
        by_main[0] = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if by_main[0]:
            processes.die_with_parent()

    os.register_at_fork(before=before, after_in_child=in_child)


def _disown_finalizers() -> None:
    """Discard exit handlers of the forkserver's modules: they belong to it, not to this rank.

    A temporary directory that a library made on import must not be deleted with the first rank; and torch
    takes 30 ms to unregister operators one by one.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    # Of matplotlib, which makes a folder of its own where it cannot write to the home directory.
    atexit.unregister(shutil.rmtree)


def _handle_interrupts(stop: int) -> None:
    """Handle SIGINT, and let the agent know that it reached Python code, also by a handler of the cell's."""
    asked_to_stop.socket, owner = stop, os.getpid()
    set_handler, get_handler = signal.signal, signal.getsignal

    def react() -> None:
        if os.getpid() == owner:
            asked_to_stop.note_interrupt()

    def on_interrupt(signum: int, frame: types.FrameType | None) -> None:
        react()
        if os.getpid() != owner or _is_interruptible(frame):
            raise KeyboardInterrupt

    @functools.wraps(set_handler)
    def set_users(signum: int, handler: Any) -> Any:
        if signum == signal.SIGINT and callable(handler) and handler is not on_interrupt:
            handler = _UsersHandler(handler, react)
        return _as_given(set_handler(signum, handler))

    @functools.wraps(get_handler)
    def get_users(signum: int) -> Any:
        return _as_given(get_handler(signum))

    set_handler(signal.SIGINT, on_interrupt)
    signal.signal, signal.getsignal = set_users, get_users  # type: ignore[assignment]


@dataclass(frozen=True)
class _UsersHandler:
    """A handler of SIGINT that the cell has set."""

    handler: Callable[[int, types.FrameType | None], Any]
    react: Callable[[], None]

    def __call__(self, signum: int, frame: types.FrameType | None) -> None:
        self.react()
        self.handler(signum, frame)


def _as_given(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _UsersHandler) else handler


def _is_interruptible(frame: types.FrameType | None) -> bool:
    """Inspect the stack: a flag would leave a gap between an exception and the flag's change."""
    while frame is not None and frame.f_code not in _interruptible:
        frame = frame.f_back
    return frame is not None


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────


def get_ready(observers: Iterable[msg.ObserverSpec]) -> None:
    """Do what does not depend on the job; workers forked ahead of time have done it when it comes.

    ``observers``: see :func:`hydrogen_magic.node.worker.observe.install`.
    """
    from hydrogen_magic.node.worker import observe

    _line_buffer_c()
    _reseed()
    _set_threads(_WAITING_THREADS)
    observe.install(observers)


# ── entering the notebook's environment ──────────────────────────────────────────────────────────


def enter_environment(start: msg.WorkerStart) -> None:
    """Take over the kernel's environment, directory and module path; become ``__main__``."""
    os.environ.clear()
    os.environ.update(start.env)
    time.tzset()
    os.chdir(start.cwd)
    sys.path[:] = start.sys_path
    sys.argv = [""]
    sparkdl.install_if_asked()
    spark_files.install_if_asked()
    # ``multiprocessing`` knows the second name, which the forkserver's own main module has had.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    # New streams: the forkserver's were made for its own descriptors.
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # Torch refuses zero, and OpenMP ignores it.
    wanted = (int(threads) if threads.isdecimal() else 0) or _default_threads
    if wanted != _WAITING_THREADS:
        _set_threads(wanted)


def update_environment(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Adopt changes of the environment; changes by the user's code stay."""
    for name in before.keys() - after.keys():
        os.environ.pop(name, None)
    os.environ.update(item for item in after.items() if before.get(item[0]) != item[1])


def _text_stream(fd: int) -> TextIO:
    """Return a line-buffered stream that accepts any string, including lone surrogates."""
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _line_buffer_c() -> None:
    """Make C's stdout line buffered: on a pipe it would keep up to 4 kB, which a crash loses."""
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


def _set_threads(threads: int) -> None:
    """Set the number of threads of libraries that the forkserver loaded without ``OMP_NUM_THREADS``."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    if "threadpoolctl" in sys.modules:
        sys.modules["threadpoolctl"].threadpool_limits(threads)


def _reseed() -> None:
    """Reset state that forks share: separate processes draw different random numbers from NumPy and torch."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
