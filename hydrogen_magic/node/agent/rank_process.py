"""State of one rank in the agent: its worker, its messages, and its exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core import address_space, processes
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.masking import masked_file
from hydrogen_magic.core.units import size_text
from hydrogen_magic.node.agent.attempt_reporter import AttemptReporter
from hydrogen_magic.node.agent.child_exit import ChildExit
from hydrogen_magic.node.agent.exit_watch import FinishWatch
from hydrogen_magic.node.agent.gpus import GpuUse
from hydrogen_magic.node.agent.output_limits import RankLog
from hydrogen_magic.node.agent.pooled_worker import PooledWorker
from hydrogen_magic.node.agent.rank_output import RankOutput
from hydrogen_magic.node.agent.stacks import StackReader
from hydrogen_magic.node.worker.checkpoints import checkpoint
from hydrogen_magic.transport import framing

_PIPE_BYTES = 1 << 16
_MOST_READS = 1 << 14
"""Reads of an exited rank's messages, one for each descriptor: more than a socket holds. What is left comes
from a process that still writes."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankProcess:
    """One rank of the attempt that runs on this host."""

    def __init__(
        self, rank: int, worker: PooledWorker, log: RankLog, reporter: AttemptReporter
    ) -> None:
        self.rank = rank
        self.worker = worker
        self.has_reacted = False
        """It has reacted to the SIGINT of a stop."""
        self.exited = False
        self.retained_files: Mapping[str, int] | None = None
        """Files on which its process depends, which waits for another gang: for that, this one is over."""
        self.on_retained: Callable[[], None] = lambda: None
        """Called when its process is retained."""
        self.on_timeline: Callable[[msg.TimelineFile], None] = lambda timeline: None
        """Called when a library on the rank starts or ends a timeline."""
        self.output = RankOutput(rank, worker, log, reporter)
        self.awaits_stacks = False
        """Its stacks were requested, and it has not written them yet."""
        self._stacks = StackReader(worker.stacks)
        self._reporter = reporter
        self._now_s, self._emit = reporter.now_s, reporter.emit
        self._finish = FinishWatch(worker.pid)
        self._is_stop_requested = False
        self._frames = framing.FrameReader(worker.control)
        self._checkpoints = Path()
        self._refused: set[str] = set()
        """Kinds of events that it has reported, and may not."""
        self._cpu: tuple[float, int] | None = None
        self.oom_kills: int | None = None
        """How often the system's out-of-memory killer had been active when the ranks started, if known."""
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.control, self._read_control)
        loop.add_reader(worker.stop, self._read_reaction)

    def launch(self, start: msg.RankStart, fds: Sequence[int], device: str) -> None:
        """Start the rank in the waiting worker."""
        if start.env.get(checkpoint.FOLDER):
            self._checkpoints = checkpoint.folder_of(start.env, start.cwd)
        self._finish.is_on_one_host = start.env.get("GROUP_WORLD_SIZE", "1") == "1"
        self.worker.control.setblocking(True)
        try:
            framing.send(self.worker.control, start, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # killed while waiting: its exit is reported like any other
        self.worker.control.setblocking(False)
        host = os.uname().nodename
        self._emit(ev.RankStarted(self._now_s(), self.rank, self.worker.pid, host, device))

    def send(self, command: msg.WorkerCommand) -> None:
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
            more = self._frames.feed()
        except BlockingIOError:
            return False
        for message, fds in self._frames.messages():
            try:
                self._handle(msg.decode(message, msg.WorkerReport), fds)
            except msg.MessageError as error:
                framing.close_all(fds)
                self._warn(str(error))
        if not more:
            asyncio.get_running_loop().remove_reader(self.worker.control)
        return more

    def _handle(self, report: msg.WorkerReport, fds: list[int]) -> None:
        match report:
            case msg.RankEvents():
                for event in report.events:
                    self._handle_event(event)
            case msg.ResultPart():
                self._reporter.send_file(self.rank, report, fds[0])
            case msg.PackingResult():
                self._finish.pack(report.step)
            case msg.ResultsDelivered():
                self._finish.delivered()
                self._emit(ev.RankResult(self._now_s(), self.rank, report.result_bytes))
            case msg.ThreadsRunning():
                self._finish.threads = report.names
            case msg.ProfileTrace():
                trace = masked_file(fds[0], self._reporter.mask)
                self._reporter.send_file(self.rank, report, trace)
            case msg.WorkerRetained():
                self._retain(report)
            case msg.TimelineFile():
                self.on_timeline(report)
            case msg.SavedCheckpoint():
                self._send_checkpoint(os.path.basename(report.file_name))

    def _handle_event(self, encoded: object) -> None:
        try:
            event = self._reporter.mask.event(ev.decode(encoded))
        except msg.MessageError as error:
            self._warn(str(error))
            return
        is_of_the_gang = isinstance(event, (ev.Notice, ev.Profiling))
        if getattr(event, "rank", None) != self.rank and not is_of_the_gang:
            self._refuse(event)
            return
        if isinstance(event, ev.RankPhase) and event.phase == "finishing":
            self._finish.begin()
        if isinstance(event, ev.Output):  # sent without a descriptor
            self.output.write_log(event.text.encode("utf-8", "replace"))
        if isinstance(event, ev.Display):
            self.output.add_display(event)
            return
        if isinstance(event, ev.InputRequested):  # the text above its prompt
            self.output.emit_printed()
        self._emit(event)

    def _refuse(self, event: ev.Event) -> None:
        """Warn that an event is not passed on, once for each kind: there may be thousands a second."""
        kind = type(event).__name__
        if kind not in self._refused:
            self._refused.add(kind)
            whose = f"of rank {event.rank}" if isinstance(event, ev.RankEvent) else "of the gang"
            self._warn(
                f"{kind} {whose} is ignored: a rank reports events with its own number, Notice and Profiling"
            )

    def _send_checkpoint(self, name: str) -> None:
        try:
            fd = os.open(self._checkpoints / name, os.O_RDONLY)
        except FileNotFoundError:
            return  # a newer one has replaced it already, and comes next
        except OSError as error:
            self._warn(f"its checkpoint cannot be sent to the notebook: {error}")
            return
        self._reporter.send_file(self.rank, msg.SavedCheckpoint(name), fd)

    def _read_reaction(self) -> None:
        self.has_reacted = True
        # A retained worker may be interrupted again in a later gang; a killed one has not read its byte.
        with suppress(BlockingIOError, ConnectionResetError):
            os.read(self.worker.stop, _PIPE_BYTES)
        asyncio.get_running_loop().remove_reader(self.worker.stop)

    def _warn(self, text: str) -> None:
        self._reporter.notice("warning", f"rank {self.rank}: {text}")

    # ── its health ──

    def check_health(self, gpu: GpuUse) -> None:
        """Emit the values of ``/proc`` and the GPU for the process, and a step of its end that takes long."""
        if self.exited:
            return
        found = next(iter(processes.processes([self.worker.pid])), None)
        if found is not None:
            self._emit(
                ev.RankHealth(
                    self._now_s(),
                    self.rank,
                    rss_bytes=found.rss_bytes,
                    cpu_percent=round(self._cpu_percent(found.cpu_ticks), 1),
                    process_state=found.state,
                    gpu_percent=gpu.percent,
                    gpu_memory_bytes=gpu.memory_bytes,
                )
            )
        if step := self._finish.slow_step():
            self._emit(ev.RankPhase(self._now_s(), self.rank, "finishing", step))

    def _cpu_percent(self, ticks: int) -> float:
        """Return the use of the CPU since the last call."""
        now = time.monotonic()
        since, before = self._cpu or (now, ticks)
        self._cpu = (now, ticks)
        return (ticks - before) / _TICKS_PER_S / (now - since) * 100 if now > since else 0.0

    def hang_at_exit(self) -> str:
        """Return why the process has to be killed after its cell; empty if it may continue."""
        return "" if self.exited else self._finish.hang()

    def request_stacks(self) -> None:
        """Make ``faulthandler`` write the stacks of all threads; works even inside a blocked collective."""
        if self.exited:
            self._emit(ev.RankStacks(self._now_s(), self.rank, ""))
            return
        self._stacks.read()
        self.awaits_stacks = True
        processes.send_signal(self.worker.pid, processes.STACKS_SIGNAL)

    def report_stacks(self, *, is_last: bool) -> None:
        """Emit the requested stacks if they were written; ``is_last``: emit an empty text otherwise.

        Stacks that are written later are emitted when the process exits.
        """
        if not self.awaits_stacks:
            return
        text = self._stacks.read()
        self.awaits_stacks = not text
        if text or is_last:
            self._emit(ev.RankStacks(self._now_s(), self.rank, text))

    # ── its end ──

    def signal(self, signum: int) -> None:
        """Send a signal to the process; it is our child and not yet reaped, so the pid is still its own."""
        self._is_stop_requested = True
        if self.exited:
            return
        if signum == signal.SIGINT:
            # It has exited, or its cell has closed the descriptor or ignores SIGINT.
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                os.write(self.worker.stop, b"i")
        processes.send_signal(self.worker.pid, signum)

    def on_exit(self, ended: ChildExit) -> None:
        """Handle the exit status: read the remaining output, then report."""
        try:
            for _ in range(_MOST_READS):
                if not self._read_control():
                    break
            self.output.read_available()
        finally:  # whatever it left behind, the rank is over
            self.exited = True
            self._report_exit(ended)

    def _retain(self, report: msg.WorkerRetained) -> None:
        """Note that the process waits for another gang: this one sees it end."""
        self.retained_files = report.files
        self.output.read_available()
        self.exited = True
        self._report_exit(ChildExit(report.exit_code << 8))
        self.on_retained()

    def _report_exit(self, ended: ChildExit) -> None:
        self.output.emit_rest()
        code = os.waitstatus_to_exitcode(ended.status)
        exit_code, signal_name = (
            (code, "") if code >= 0 else (None, processes.name_of_signal(-code))
        )
        is_requested = self._is_stop_requested
        crash = self._stacks.read() if signal_name and not is_requested else ""
        self.report_stacks(is_last=True)
        self.awaits_stacks = False
        hint = "" if is_requested else self._hint(exit_code, signal_name, ended)
        how = (exit_code, signal_name, is_requested, hint, crash)
        self._emit(ev.RankExited(self._now_s(), self.rank, *how))

    def _hint(self, exit_code: int | None, signal_name: str, ended: ChildExit) -> str:
        hints = [f"while {self._finish.step}"] if self._finish.step else []
        if ended.has_reached_cpu_limit:
            hints.append("its CPU time reached its limit: raise RLIMIT_CPU (`ulimit -t`)")
        elif signal_name == "SIGKILL":
            hints.append(self._why_killed(ended.max_rss_bytes))
        if limit := address_space.exit_note(exit_code, signal_name):
            hints.append(limit)
        return "; ".join(hints)

    def _why_killed(self, max_rss_bytes: int) -> str:
        peak = f"it used up to {size_text(max_rss_bytes)} of memory"
        if self.oom_kills is not None and processes.oom_kills() > self.oom_kills:
            return f"out of memory: the system's OOM killer was active; {peak}"
        return f"another process killed it, or the system was out of memory; {peak}"

    def close(self, *, is_retained: bool) -> None:
        """Close the log, and the pipes unless the process is retained for another gang."""
        self.awaits_stacks = False
        self.output.close()
        for fd in (self.worker.control.fileno(), self.worker.stop):
            asyncio.get_running_loop().remove_reader(fd)
        self._frames.close()
        if not is_retained:
            self.worker.close()
