"""A kernel's side of the connection to the owner of a gang: a :class:`Gang` that another process runs."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from hydrogen_magic import errors
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.driver import kernel_end, known_gangs
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.owner import local_socket
from hydrogen_magic.driver.owner.recorded_gang import RecordedGang
from hydrogen_magic.driver.state.stored_results import SavedResults
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.transport import framing
from hydrogen_magic.views import static_picture

_ANSWER_S = 5.0
"""How long an owner may take to answer; a stopped process (SIGSTOP) does not."""
_POLL_S = 0.1
_HISTORY_S = 60.0
"""Later events are added while the gang is shown; a gigabyte of them arrives in less."""
_SILENCE_S = 3.0
"""Ranks report their health once a second: after this silence, the owner may be stopped (SIGSTOP)."""
_RECORD_S = 15.0
"""How long agents may take to end a gang whose owner was killed."""


class AttachedGang(Gang):
    """A gang that another process owns."""

    connection: OwnerConnection


class OwnerConnection:
    """Controls the gang as its controller does, if this connection has control."""

    def __init__(self, sock: socket.socket, wants: str) -> None:
        """Attach.

        Closes ``sock`` if that fails: raises OSError if the owner exits meanwhile, HydrogenError if it
        refuses, and ValueError if its answer cannot be read.
        """
        self._sock = sock
        self._reader = framing.FrameReader(sock)
        self._sending = threading.RLock()
        """Reentrant: a signal may stop the gang while a request is being sent."""
        self.is_open = True
        """False after :meth:`close`."""
        try:
            self._send(msg.Attach(wants, _own_name()))
            self.attached = self._first_answer()
        except BaseException:
            sock.close()
            raise
        self._has_history = threading.Event()
        self._has_control = threading.Event()
        self._n_received = 0
        """Events of the owner; the run also has our own notices."""
        self._n_recorded = 0
        """Those of them that the record has, too."""
        self._is_stopped = False
        """The owner is stopped, and that was reported."""
        self._set_control(self.attached.control)

    def follow(self) -> AttachedGang:
        """Return the gang, with all events until now; a thread adds the later ones."""
        path = run_log.run_dir(self.attached.gang)
        record = run_log.Record(path, None, lambda text: None)
        run = GangRun(path.name, record, results=SavedResults(path.name, path))
        gang = AttachedGang(run, self, static_picture)
        gang.connection = self
        name = f"hydrogen_magic connection to gang {gang.id}"
        threading.Thread(target=self._follow, args=(run, gang), name=name, daemon=True).start()
        self._has_history.wait(_HISTORY_S)
        known_gangs.register(gang)
        return gang

    def close(self) -> None:
        """Detach; the gang continues."""
        self.is_open = False
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # ── requests ──

    def take_control(self) -> None:
        """Take control from another connection. Raises HydrogenError if the owner does not answer."""
        self._send(msg.TakeControl())
        if not self._has_control.wait(_ANSWER_S):
            raise HydrogenError(_silent(self.attached.gang))

    def stop(self, reason: str, kill: bool = False) -> None:
        self._command(msg.AskGang("stop", int(kill)))

    def ask_stacks(self) -> None:
        self._send(msg.AskGang("ask_stacks"))

    def record(self, on: bool) -> None:
        self._command(msg.AskGang("record", int(on)))

    def profile(self, steps: int) -> None:
        self._command(msg.AskGang("profile", steps))

    def answer_input(self, rank: int, number: int, text: str, error: str = "") -> None:
        """Do nothing: no cell waits for an outliving gang, so its owner has refused the request."""

    def _command(self, command: msg.AskGang) -> None:
        if not self.control.is_yours:
            gang, holder = self.attached.gang, self.control.holder
            remedy = "stop" if command.do == "stop" else "attach"
            raise HydrogenError(
                f"gang {gang} is controlled by {holder}: {command.do} it there, or take control: "
                f"%gang {remedy} {gang} --take"
            )
        self._send(command)

    def _send(self, command: msg.OwnerCommand) -> None:
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):  # see _finish()
            if self._sock.fileno() >= 0:  # open: the gang has not ended
                framing.send(self._sock, command)

    # ── reports ──

    def _first_answer(self) -> msg.Attached:
        answer = next(self._reports(), None)
        if isinstance(answer, msg.Attached):
            self._sock.settimeout(None)
            return answer
        if isinstance(answer, msg.LaunchRefused):
            raise _error_of(answer)
        raise ConnectionError("the owner process exited")

    def _reports(
        self, on_silence: Callable[[bool], None] | None = None
    ) -> Iterator[msg.OwnerReport]:
        """Yield what arrives; ``on_silence`` is called with True while nothing does, then with False."""
        while True:
            for message, _ in self._reader.messages():
                yield msg.decode(message, msg.OwnerReport)
            if on_silence is not None:
                while not _is_readable(self._sock, _SILENCE_S):
                    on_silence(True)
                on_silence(False)
            if not self._reader.feed():
                return

    def _follow(self, run: GangRun, gang: Gang) -> None:
        """Add events until the owner exits. ``gang`` is kept, and with it in the kernel's list."""
        try:
            for report in self._reports(partial(self._watch, run)):
                self._take(report, run)
        except (OSError, ValueError):
            pass  # closed, or of another version: the record has the rest
        finally:
            self._has_history.set()
        if self.is_open:
            _wait_for_end(run)
            _finish(run, self._n_recorded)
            run_log.mark_seen(run.id)  # an owner that was killed has not done so
            with self._sending:
                self._sock.close()
        else:
            run.finish()  # views of the gang end, too

    def _take(self, report: msg.OwnerReport, run: GangRun) -> None:
        if isinstance(report, msg.Control):
            self._set_control(report)
        elif isinstance(report, msg.OwnerEvents):
            for event in map(ev.decode, report.events):
                run.append(event)
                self._n_recorded += run_log.is_recorded(event)
            self._n_received += len(report.events)
        if self._n_received >= self.attached.n_events:
            self._has_history.set()

    def _watch(self, run: GangRun, is_silent: bool) -> None:
        """Report when the owner is stopped, and when it continues."""
        is_stopped = is_silent and run_log.is_stopped(run.state.owner)
        if is_stopped == self._is_stopped:
            return
        self._is_stopped = is_stopped
        pid, after_s = run_log.pid_of(run.state.owner), max(0.0, time.time() - run.state.wall_time)
        text = f"the owner process of the gang (pid {pid})"
        if is_stopped:
            text += f" is stopped (SIGSTOP) and reports nothing: kill -CONT {pid} resumes it"
        else:
            text += " responds again"
        run.append(ev.Notice(after_s, "warning" if is_stopped else "info", text))

    def _set_control(self, control: msg.Control) -> None:
        self.control = control
        self._has_control.set() if control.is_yours else self._has_control.clear()


def _is_readable(sock: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _wait_for_end(run: GangRun) -> None:
    """Return when agents have ended the ranks of a gang whose owner was killed: they record its end.

    The record of a full disk never has it.
    """
    deadline_s = time.monotonic() + _RECORD_S
    while not run.state.is_terminal and (found := _unended(run.id)) is not None:
        if time.monotonic() > deadline_s and not run_log.is_alive(found.launched.owner):
            kernel_end.end_abandoned([run.id])
            return
        time.sleep(_POLL_S)


def _unended(gang_id: str) -> run_log.Summary | None:
    found = run_log.summary(gang_id)
    return None if found is None or found.ended is not None else found


def _finish(run: GangRun, n_known: int) -> None:
    """End a run with the events that only its record has; ``n_known``: how many of those it has."""
    with suppress(HydrogenError):
        for event in run_log.read(run.id)[n_known:]:
            run.append(event)
    if not run.state.is_terminal:  # the record is lost, or cannot be written
        reason = "its owner process ended unexpectedly"
        run.append(ev.GangEnded(run.state.now_s, "STOPPED", reason))
    run.finish()


def _error_of(refused: msg.LaunchRefused) -> Exception:
    """Return the error of a launch that the owner refused."""
    kind = getattr(errors, refused.error, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(refused.text)
    return HydrogenError(f"{refused.error}: {refused.text}")


def _own_name() -> str:
    """Return what messages call this process."""
    notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
    return f"{notebook} (process {os.getpid()})" if notebook else f"process {os.getpid()}"


# ── attaching ────────────────────────────────────────────────────────────────────────────────────


def attach(gang_id: str, wants: str = "control") -> Gang:
    """Return a gang that outlives its kernel: with its owner while it runs, else from its record.

    ``wants``: see :class:`hydrogen_magic.core.messages.Attach`. Raises HydrogenError if its owner does not
    answer, or runs on another machine.
    """
    known = known_gangs.gangs().get(gang_id)
    if isinstance(known, AttachedGang) and known.connection.is_open:
        if wants == "take" and not known.snapshot().is_terminal:
            known.connection.take_control()
        return known
    found = run_log.summary(gang_id)
    deadline_s = time.monotonic() + _ANSWER_S
    while found is not None and found.ended is None and run_log.is_alive(found.launched.owner):
        with suppress(ConnectionError, FileNotFoundError):  # it begins or ends right now
            return connect(gang_id, wants).follow()
        if time.monotonic() > deadline_s:
            raise HydrogenError(_silent(gang_id))
        time.sleep(_POLL_S)
        found = run_log.summary(gang_id)
    if found is not None and found.ended is None:
        if not run_log.is_over(found) or run_log.is_elsewhere(found.launched):
            raise HydrogenError(f"gang {gang_id} runs on {found.launched.host}: attach to it there")
        kernel_end.end_abandoned([gang_id])
    run_log.mark_seen(gang_id)
    gang = RecordedGang(gang_id)
    gang.snapshot()  # it cannot be used if its record cannot be read
    return known_gangs.register(gang)


def connect(gang_id: str, wants: str) -> OwnerConnection:
    """Return a new connection. Raises OSError if no owner listens, HydrogenError if it gives no answer."""
    sock = local_socket.connect(run_log.run_dir(gang_id), _ANSWER_S)
    try:
        return OwnerConnection(sock, wants)
    except TimeoutError:
        raise HydrogenError(_silent(gang_id)) from None
    except ValueError as error:
        raise HydrogenError(
            f"the owner process of gang {gang_id} is of another version, its answer cannot be read: {error}"
        ) from error


def _silent(gang_id: str) -> str:
    return f"the owner process of gang {gang_id} did not answer for {_ANSWER_S:g} s"
