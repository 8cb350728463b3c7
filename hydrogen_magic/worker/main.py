"""One rank: a process forked from the template, from its first instruction to its exit code.

It talks to nobody but its agent, over an inherited socket: ``go`` comes in with the closure, events
and the result go out. Output is not its business: descriptors 1 and 2 are pipes that the agent reads.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from hydrogen_magic import events as ev
from hydrogen_magic import frames, processes
from hydrogen_magic.errors import CaptureError

__all__ = ["WorkerPipes", "run_worker"]

_IOLBF = 1
"""C's line buffering."""

_INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
"""What a shell reports for a program that Ctrl-C ended."""

_WAITING_THREADS = 1
"""Threads per rank unless something else is asked for: several ranks share the cores."""

_default_threads = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
"""What libraries use by themselves."""

_asked_to_stop = threading.Event()


@dataclass(frozen=True)
class WorkerPipes:
    """A worker's ends of what connects it to its agent, as file descriptors."""

    control: int
    """Stream socket: ``go`` in, events and results out."""
    stdout: int
    stderr: int
    interrupted: int
    """Pipe: one byte when a SIGINT reached Python code, so that the agent knows it is being heard."""
    stacks: int
    """Memory file that ``faulthandler`` writes to, on SIGUSR1 and at fatal signals."""

    def all(self) -> tuple[int, ...]:
        return (self.control, self.stdout, self.stderr, self.interrupted, self.stacks)


def run_worker(pipes: WorkerPipes, agent_pid: int) -> NoReturn:
    """Be a worker until the end of this process; called in a fresh fork of the template."""
    code = 1
    try:
        _settle_in(pipes, agent_pid)
        _get_ready()
        control = socket.socket(fileno=pipes.control)
        received = frames.receive(frames.FrameReader(control))
        if received is None:
            os._exit(0)  # forked ahead of time and not needed any more
        go, fds = received
        _move_in(go)
        if go["kind"] == "service":
            _serve(go, fds)
        code = _Rank(control, go, fds, pipes).run()
    except BaseException:  # the last frame of this process: nobody above could print it
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


# ── becoming a process of its own ────────────────────────────────────────────────────────────────


def _settle_in(pipes: WorkerPipes, agent_pid: int) -> None:
    os.setsid()
    _wait_for_parent(agent_pid)
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
    faulthandler.register(signal.SIGUSR1, file=pipes.stacks, all_threads=True)
    signal.signal(signal.SIGINT, _interrupt_handler(pipes.interrupted))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait_for_parent(agent_pid: int) -> None:
    """Wait until the go-between that forked us has gone and the agent is our parent.

    Parent-death signals count from the parent at that time, so armed earlier it would fire now.
    """
    deadline = time.monotonic() + 5.0
    while os.getppid() != agent_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)


def _pass_on_death() -> None:
    """Arm forked children (DataLoader workers) too: the signal is not inherited.

    Only for forks by the main thread: the signal follows the parent *thread*, and children of a
    short-lived thread would be killed at its end. The agent's sweep ends those.
    """
    by_main: list[bool] = [False]

    def before() -> None:
        by_main[0] = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if by_main[0]:
            processes.die_with_parent()

    os.register_at_fork(before=before, after_in_child=in_child)


def _disown_finalizers() -> None:
    """Leave to the template what its modules wanted done at exit: it is theirs, not this rank's.

    A temporary directory that a library made at import must not go with the first rank; and torch
    takes 30 ms to unregister operators one by one.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def _interrupt_handler(interrupted: int) -> Any:
    owner = os.getpid()

    def on_interrupt(signum: int, frame: object) -> None:
        if os.getpid() == owner:
            _asked_to_stop.set()
            os.write(interrupted, b"i")
        raise KeyboardInterrupt

    return on_interrupt


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────


def _get_ready() -> None:
    """Do what does not depend on the job; workers forked ahead of time have done it when it comes."""
    from hydrogen_magic.worker import observe

    _line_buffer_c()
    _reseed()
    _set_threads(_WAITING_THREADS)
    observe.install()


# ── moving in ────────────────────────────────────────────────────────────────────────────────────


def _move_in(go: dict[str, Any]) -> None:
    """Take over the kernel's environment, directory and module path; become ``__main__``."""
    os.environ.clear()
    os.environ.update(go["env"])
    os.chdir(go["cwd"])
    sys.path[:] = go["sys_path"]
    sys.argv = [""]
    # ``multiprocessing`` knows the second name, which the template's own main module has had.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    # New ones: the template's were made for whatever its descriptors were.
    sys.stdout = _text_stream(1)
    sys.stderr = _text_stream(2)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wanted = int(threads) if threads.isdigit() else _default_threads
    if wanted != _WAITING_THREADS:
        _set_threads(wanted)


def _text_stream(fd: int) -> TextIO:
    """Return a line-buffered stream that takes any string, lone surrogates included."""
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _line_buffer_c() -> None:
    """Make C's stdout line buffered: on a pipe it would keep up to 4 kB, lost in a crash."""
    libc = ctypes.CDLL(None)
    name = "__stdoutp" if sys.platform == "darwin" else "stdout"
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _IOLBF, 0)


def _set_threads(threads: int) -> None:
    """Tell libraries that the template loaded, without ``OMP_NUM_THREADS``, how many to use."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    if "threadpoolctl" in sys.modules:
        sys.modules["threadpoolctl"].threadpool_limits(threads)


def _reseed() -> None:
    """Undo what a fork shares: fresh processes draw different numbers from NumPy and torch."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _serve(go: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Run a rendezvous' service (``module:function``) on the listening socket in ``fds``."""
    null = os.open(os.devnull, os.O_WRONLY)  # nobody reads what a service says
    os.dup2(null, 1)
    os.dup2(null, 2)
    module, _, function = go["service"].partition(":")
    getattr(importlib.import_module(module), function)(fds[0], **go["options"])
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass  # closed by the user, or the agent has gone
    ctypes.CDLL(None).fflush(None)


# ── running ──────────────────────────────────────────────────────────────────────────────────────


class _Rank:
    """The cell's life on this rank."""

    def __init__(
        self, control: socket.socket, go: dict[str, Any], fds: Sequence[int], pipes: WorkerPipes
    ) -> None:
        from hydrogen_magic.worker import reporter

        self.rank = int(go["rank"])
        self.closure_fd = fds[0]
        self.control = control
        self.lock = threading.Lock()
        self.phase = "starting"
        self.reporter = reporter.Reporter(self.rank, go["clock_zero_s"], self._send_events)
        reporter.install(self.reporter)

    def run(self) -> int:
        """Load, run, deliver; return the exit code."""
        self.reporter.start()
        try:
            code = self._work()
        except KeyboardInterrupt as error:
            code = _INTERRUPTED_EXIT_CODE if _asked_to_stop.is_set() else self._fail(error)
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException as error:
            code = self._fail(error)
        self._leave()
        return code

    def _work(self) -> int:
        from hydrogen_magic import parcel
        from hydrogen_magic.worker import namespace

        self._enter("loading")
        closure = parcel.from_memfd(self.closure_fd)
        os.close(self.closure_fd)
        loaded = namespace.load(closure)
        del closure
        gc.unfreeze()
        for text in loaded.warnings:
            self.reporter.post(ev.Notice(self.reporter.now_s(), "warning", text))
        self._enter("running")
        value = _run_script(loaded) if loaded.is_script else loaded.run()
        self._enter("finishing")
        self._deliver(loaded, value)
        return 0

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.reporter.post(ev.RankPhase(self.reporter.now_s(), self.rank, phase))

    def _fail(self, error: BaseException) -> int:
        """Report ``error`` before any clean-up of ours; return the exit code."""
        from hydrogen_magic.worker import watch

        left = error.exit_code if isinstance(error, _ScriptExitError) else None
        report = watch.report_exception(error if left is None else error.__cause__ or error)
        self.reporter.post(
            ev.RankFailed(
                self.reporter.now_s(), self.rank, report, self.phase,
                exit_code=left,
            )
        )  # fmt: skip
        return 1 if left is None else left

    def _deliver(self, loaded: Any, value: Any) -> None:
        """Send the value home. Only rank 0 must succeed: other ranks' values are rarely asked for."""
        from hydrogen_magic import parcel

        try:
            result = loaded.collect(value)
        except CaptureError as error:
            if self.rank == 0:
                raise
            result = parcel.pack({"value": None, "out": {}, "error": str(error)})
        fd = parcel.to_memfd(result, f"result-{self.rank}")
        with self.lock:
            frames.send(self.control, {"result": result.nbytes}, [fd])
        os.close(fd)

    def _leave(self) -> None:
        """Run exit handlers as the interpreter would, but not its slow tear-down of modules."""
        self.reporter.close()
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads
            atexit._run_exitfuncs()
        except BaseException:
            sys.excepthook(*sys.exc_info())

    def _send_events(self, batch: Sequence[ev.Event]) -> None:
        with self.lock:
            frames.send(self.control, {"events": [ev.encode(event) for event in batch]})


class _ScriptExitError(Exception):
    """A script called ``sys.exit`` with something else than success."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def _run_script(loaded: Any) -> Any:
    """Run a script or module: leaving by ``sys.exit(0)`` is its normal end, as for ``python``."""
    try:
        return loaded.run()
    except SystemExit as error:
        code = _exit_code(error)
        if code != 0:
            raise _ScriptExitError(code) from error
        return None


def _exit_code(error: BaseException | None) -> int:
    """Return the process's exit code for a SystemExit, as the interpreter computes it."""
    code = getattr(error, "code", 1)
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
