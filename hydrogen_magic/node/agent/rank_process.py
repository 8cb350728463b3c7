"""State of one rank in the agent: its worker, its messages, and its exit status."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.masking import Mask, masked_file
from hydrogen_magic.core.messages import (
    FileContent,
    MessageError,
    PackingResult,
    ProfileTrace,
    RankEvents,
    RankStart,
    ResultPart,
    ResultsDelivered,
    SavedCheckpoint,
    TimelineFile,
    WorkerCommand,
    WorkerReport,
    WorkerRetained,
    decode,
)
from hydrogen_magic.node.agent.exit_watch import ExitWatch
from hydrogen_magic.node.agent.gpus import GpuUse
from hydrogen_magic.node.agent.output import CHUNK, LivePart, LiveText, RankLog, TokenBucket
from hydrogen_magic.node.agent.worker_pool import PooledWorker
from hydrogen_magic.node.worker import checkpoint
from hydrogen_magic.transport import framing

__all__ = ["RankProcess"]

_PACKAGE = f'File "{Path(__file__).parents[2]}{os.sep}'
_OUR_THREAD = _PACKAGE + "node/worker/reporter.py"
_OUR_HOOKS = re.compile(re.escape(_PACKAGE) + r"(\w+/)*node/(worker/)?observe/")
_BELOW_THE_CELL = (_PACKAGE + "node/worker/namespace.py", _PACKAGE + "node/worker/main.py")
_LONG_S = 1.0
"""Packing a result that takes longer is reported: a user's ``__getstate__`` may compute for minutes."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_DRAIN_CHUNKS = 32
"""A pipe holds at most 1 MB; more than twice that comes from a process that still writes."""


class RankProcess:
    """One rank of the attempt that runs on this host."""

    def __init__(
        self,
        rank: int,
        worker: PooledWorker,
        log: RankLog,
        now_s: Callable[[], float],
        emit: Callable[[ev.Event], None],
        hand_over: Callable[[int, FileContent, int], None],
        mask: Mask,
    ) -> None:
        self.rank = rank
        self.worker = worker
        self.asked = False
        """The agent has asked it to end."""
        self.heard = False
        """It has reacted to that."""
        self.exited = False
        self.stays: Mapping[str, int] | None = None
        """For its process the gang is over, which waits for another one: the files that it depends on."""
        self.has_delivered = False
        """All its results have arrived here."""
        self._doing = ""
        """The current step of sending its results, such as "packing `model`"."""
        self._doing_since_s = 0.0
        self.exit_watch: ExitWatch | None = None
        """Time since the end of its cell."""
        self.on_stay: Callable[[], None] = lambda: None
        """Called when its process is kept."""
        self.on_timeline: Callable[[TimelineFile], None] = lambda timeline: None
        """Called when a library on the rank starts or ends a timeline."""
        self._log = log
        self._now_s = now_s
        self._emit = emit
        self._hand_over = hand_over
        self._mask = mask
        self._masked = {"stdout": mask.stream(), "stderr": mask.stream()}
        self._live = {"stdout": LiveText(), "stderr": LiveText()}
        self._reader = framing.FrameReader(worker.control)
        self._stacks_read = os.fstat(worker.stacks).st_size
        self._checkpoints = ""
        self._cpu: tuple[float, int] | None = None
        self._oom_kills = processes.oom_kills()
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.control, self._read_control)
        loop.add_reader(worker.stdout, self._read_output, worker.stdout, "stdout")
        loop.add_reader(worker.stderr, self._read_output, worker.stderr, "stderr")
        loop.add_reader(worker.interrupted, self._read_interrupted)

    def go(self, start: RankStart, fds: Sequence[int], device: str) -> None:
        """Send the worker off."""
        self._checkpoints = start.env.get(checkpoint.FOLDER, "")
        self.worker.control.setblocking(True)
        try:
            framing.send(self.worker.control, start, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # killed while waiting: its exit is reported like any other
        self.worker.control.setblocking(False)
        host = os.uname().nodename
        self._emit(ev.RankStarted(self._now_s(), self.rank, self.worker.pid, host, device))

    def tell(self, command: WorkerCommand) -> None:
        """Send a command, which the rank reads while it runs; see ``node.worker.commands``."""
        if self.exited:
            return
        try:
            framing.send(self.worker.control, command)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass  # it has not read thousands of commands, or has exited: nothing waits for it

    # ── its messages ──

    def _read_control(self) -> bool:
        try:
            more = self._reader.feed()
        except BlockingIOError:
            return False
        for message, fds in self._reader.messages():
            try:
                self._take(decode(message, WorkerReport), fds)
            except MessageError as error:
                _close_all(fds)
                self._emit(ev.Notice(self._now_s(), "warning", f"rank {self.rank}: {error}"))
        if not more:
            asyncio.get_running_loop().remove_reader(self.worker.control)
        return more

    def _take(self, report: WorkerReport, fds: list[int]) -> None:
        match report:
            case RankEvents():
                for event in report.events:
                    self._take_event(event)
            case ResultPart():
                self._hand_over(self.rank, report, fds[0])
            case PackingResult():
                self._doing, self._doing_since_s = report.step, time.monotonic()
            case ResultsDelivered():
                self.has_delivered = True
                self._doing = ""
                self._emit(ev.RankResult(self._now_s(), self.rank, report.result_bytes))
            case ProfileTrace():
                self._hand_over(self.rank, report, masked_file(fds[0], self._mask))
            case WorkerRetained():
                self._stay(report.files)
            case TimelineFile():
                self.on_timeline(report)
            case SavedCheckpoint():
                self._hand_over_checkpoint(report.file_name)

    def _take_event(self, encoded: object) -> None:
        try:
            event = self._mask.event(ev.decode(encoded))
        except ev.EventError as error:
            self._emit(ev.Notice(self._now_s(), "warning", f"rank {self.rank}: {error}"))
            return
        of_the_gang = isinstance(event, (ev.Notice, ev.Profiling))
        if getattr(event, "rank", None) == self.rank or of_the_gang:
            self._note(event)
            self._emit(event)

    def _hand_over_checkpoint(self, name: str) -> None:
        try:
            fd = os.open(os.path.join(self._checkpoints, os.path.basename(name)), os.O_RDONLY)
        except FileNotFoundError:
            return  # a newer one has replaced it already, and comes next
        self._hand_over(self.rank, SavedCheckpoint(os.path.basename(name)), fd)

    def _note(self, event: ev.Event) -> None:
        is_finishing = isinstance(event, ev.RankPhase) and event.phase == "finishing"
        if is_finishing and self.exit_watch is None:
            self.exit_watch = ExitWatch(self.worker.pid, time.monotonic())
        if isinstance(event, ev.Output):  # sent without a descriptor
            self._write_log(event.text.encode("utf-8", "replace"))

    def _read_output(self, fd: int, stream: str) -> bool:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
            return False
        self._take_text(stream, self._masked[stream].feed(data))
        return True

    def _take_text(self, stream: str, data: bytes) -> None:
        if data:
            self._write_log(data)
            self._live[stream].feed(data)

    def _write_log(self, data: bytes) -> None:
        problem = self._log.write(data)
        if problem:
            self._emit(ev.Notice(self._now_s(), "warning", f"rank {self.rank}: {problem}"))

    def _read_interrupted(self) -> None:
        self.heard = True
        asyncio.get_running_loop().remove_reader(self.worker.interrupted)

    def send_output(self, allowance: TokenBucket) -> None:
        """Emit new output within the limit."""
        for stream, live in self._live.items():
            self._emit_text(stream, live.take(allowance))

    def _emit_text(self, stream: str, taken: LivePart | None) -> None:
        if taken is not None:
            self._emit(ev.Output(self._now_s(), self.rank, stream, *taken))

    # ── its health ──

    def check_health(self, gpu: GpuUse) -> str:
        """Emit the values of ``/proc`` and the GPU for the process; return its state letter."""
        found = next(iter(processes.processes([self.worker.pid])), None)
        if found is None or self.exited:
            return ""
        now = time.monotonic()
        cpu = 0.0
        if self._cpu is not None and now > self._cpu[0]:
            cpu = (found.cpu_ticks - self._cpu[1]) / _TICKS_PER_S / (now - self._cpu[0]) * 100
        self._cpu = (now, found.cpu_ticks)
        self._emit(
            ev.RankHealth(
                self._now_s(), self.rank, found.rss_bytes, round(cpu, 1), found.state,
                gpu.percent, gpu.memory_bytes,
            )
        )  # fmt: skip
        return found.state

    def report_packing(self) -> None:
        """Emit once the progress with its results, if that takes long."""
        waited_s = time.monotonic() - self._doing_since_s
        if self._doing and not self.exited and waited_s > _LONG_S:
            self._doing_since_s = math.inf
            self._emit(ev.RankPhase(self._now_s(), self.rank, "finishing", self._doing))

    def hangs_at_exit(self) -> str:
        """Return why the process has to be killed after its cell; empty if it may continue."""
        if self.exited or self.exit_watch is None:
            return ""
        why = self.exit_watch.look(time.monotonic(), self.has_delivered)
        if why:
            self.exit_watch = None
        return why

    def ask_stacks(self) -> None:
        """Make ``faulthandler`` write the stacks of all threads; works even inside a blocked collective."""
        if not self.exited:
            processes.send_signal(self.worker.pid, signal.SIGUSR1)

    def read_stacks(self) -> str:
        """Return the stacks written since the last call, without our own lines."""
        size = os.fstat(self.worker.stacks).st_size
        data = os.pread(self.worker.stacks, size - self._stacks_read, self._stacks_read)
        self._stacks_read = size
        return without_our_frames(data.decode("utf-8", "replace"))

    # ── its end ──

    def signal(self, signum: int) -> None:
        """Send a signal to the process; it is our child and not yet reaped, so the pid is still its own."""
        self.asked = True
        if not self.exited:
            processes.send_signal(self.worker.pid, signum)

    def on_exit(self, status: int, max_rss_bytes: int) -> None:
        """Handle the exit status: read the remaining output, then report."""
        try:
            self._drain()
        finally:  # whatever it left behind, the rank is over
            self.exited = True
            self._report_exit(status, max_rss_bytes)

    def _stay(self, files: Mapping[str, int]) -> None:
        """Take note that the process waits for another gang: this one sees it end well."""
        self.stays = files
        for fd, stream in ((self.worker.stdout, "stdout"), (self.worker.stderr, "stderr")):
            self._read_all(fd, stream)
        self.exited = True
        self._report_exit(0, 0)
        self.on_stay()

    def _report_exit(self, status: int, max_rss_bytes: int) -> None:
        for stream, live in self._live.items():
            self._take_text(stream, self._masked[stream].rest())
            self._emit_text(stream, live.rest())
        exit_code, signal_name = None, ""
        if os.WIFSIGNALED(status):
            signal_name = _name_of_signal(os.WTERMSIG(status))
        else:
            exit_code = os.WEXITSTATUS(status)
        crash = self.read_stacks() if signal_name and not self.asked else ""
        hint = self._hint(signal_name, max_rss_bytes)
        self._emit(
            ev.RankExited(
                self._now_s(), self.rank, exit_code, signal_name, self.asked, hint, crash
            )
        )  # fmt: skip

    def _hint(self, signal_name: str, max_rss_bytes: int) -> str:
        if self.asked:
            return ""
        hints = [f"while {self._doing}"] if self._doing else []
        if signal_name == "SIGKILL":
            hints.append(self._why_killed(max_rss_bytes))
        return "; ".join(hints)

    def _why_killed(self, max_rss_bytes: int) -> str:
        peak = f"it used up to {max_rss_bytes / 1e9:.1f} GB of memory"
        if processes.oom_kills() > self._oom_kills:
            return f"out of memory: the system's OOM killer was active; {peak}"
        return f"another process killed it, or the system was out of memory; {peak}"

    def _drain(self) -> None:
        """Read the current contents of the pipes, not until their end: a grandchild may hold them open."""
        for _ in range(_DRAIN_CHUNKS):
            if not self._read_control():
                break
        for fd, stream in ((self.worker.stdout, "stdout"), (self.worker.stderr, "stderr")):
            self._read_all(fd, stream)

    def _read_all(self, fd: int, stream: str) -> None:
        for _ in range(_DRAIN_CHUNKS):
            if not self._read_output(fd, stream):
                break

    def close(self, is_kept: bool = False) -> None:
        """Close the log, and the pipes unless the process is kept for another gang."""
        loop = asyncio.get_running_loop()
        for fd in (self.worker.control.fileno(), self.worker.stdout, self.worker.stderr,
                   self.worker.interrupted):  # fmt: skip
            loop.remove_reader(fd)
        self._reader.close()
        if not is_kept:
            self.worker.close()
        self._log.close()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _name_of_signal(signum: int) -> str:
    """Return ``SIGKILL`` and so on; most real-time signals have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def without_our_frames(stacks: str) -> str:
    """Remove frames below the user's code, and threads that are internal.

    ``faulthandler`` prints the innermost frame first, so everything after our first line is
    internal.
    """
    threads = [thread.splitlines() for thread in stacks.split("\n\n") if _OUR_THREAD not in thread]
    return "\n\n".join("\n".join(_users_part(lines)) for lines in threads)


def _users_part(lines: list[str]) -> list[str]:
    below = (n for n, line in enumerate(lines) if line.strip().startswith(_BELOW_THE_CELL))
    return [line for line in lines[: next(below, None)] if not _OUR_HOOKS.match(line.strip())]


def log_path(record_dir: str, rank: int) -> str:
    """Return the path of the rank's complete output."""
    return str(Path(record_dir) / f"rank-{rank}.log")
