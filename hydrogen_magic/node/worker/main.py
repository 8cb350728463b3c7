"""One rank: a process forked from the forkserver, from its start to its exit code.

It communicates only with its agent, over an inherited socket: ``go`` arrives with the closure, events and
the result are sent. It does not handle output: descriptors 1 and 2 are pipes that the agent reads.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.node.worker import process_setup, standard_streams
from hydrogen_magic.transport import framing

if TYPE_CHECKING:
    from hydrogen_magic.node.worker import namespace, user_signals
    from hydrogen_magic.node.worker.inference import rank_inference
    from hydrogen_magic.node.worker.reporting import reporter
    from hydrogen_magic.node.worker.session import group_recovery, session_loop, session_names
    from hydrogen_magic.serialization.payload import Payload

_INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
"""Exit code that shells use for a program ended by Ctrl-C."""
_DESCRIPTORS_CLOSED = (
    b"the connection of this rank is closed: the cell has closed file descriptors that are not its own, "
    b"as os.closerange(3, 256) does; close those that it has opened\n"
)
_ERROR_CHARS = 4000
_EARLY_EXIT = "exit code 0 before the end of the cell counts as a failure of the rank"


def run_worker(
    pipes: process_setup.WorkerPipes,
    agent_pid: int,
    intermediate_pid: int,
    observers: Sequence[msg.ObserverSpec],
) -> NoReturn:
    """Be a worker until the end of this process; called in a fresh fork of the forkserver.

    ``observers``: see :func:`hydrogen_magic.node.worker.observe.install`.
    """
    code, pid, connection = 1, os.getpid(), os.fstat(pipes.control)
    try:
        process_setup.detach(pipes, agent_pid, intermediate_pid)
        process_setup.get_ready(observers)
        control = framing.inherited(pipes.control)
        reader = framing.FrameReader(control)
        received = framing.receive(reader)
        if received is None:
            os._exit(0)  # forked ahead of time and not needed any more
        message, fds = received
        start = msg.decode(message, msg.WorkerStart)
        if isinstance(start, msg.ServiceStart):
            process_setup.enter_environment(start)
            _serve(start.service, fds)
        elif isinstance(start, msg.RankStart):
            code = _run(control, reader, start, fds)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the agent has exited, and ends this process: that is not a failure of the rank
    except BaseException as error:  # the outermost frame: no caller could print it
        if _is_open(pipes.control, connection):  # otherwise that is the reason
            _print_exception(error)
    finally:
        standard_streams.flush()
        if os.getpid() == pid and not _is_open(pipes.control, connection):
            with suppress(OSError):  # standard error is closed, too
                os.write(2, _DESCRIPTORS_CLOSED)
        os._exit(code)


def _is_open(fd: int, file: os.stat_result) -> bool:
    """Return whether the descriptor is still that of this file."""
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False


def _print_exception(error: BaseException) -> None:
    from hydrogen_magic.node.worker import main_thread

    users = main_thread.users_part(error.__traceback__)
    if users is not None:  # otherwise the fault is ours
        error.__traceback__ = users  # Python's hook shows this one, whatever its argument is
    sys.excepthook(type(error), error, error.__traceback__)


def _serve(service: msg.ServiceSpec, fds: Sequence[int]) -> NoReturn:
    """Run a rendezvous' service on the listening socket in ``fds``."""
    errors = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)  # the output of a service is not read
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.set_blocking(fds[0], True)  # a store that was begun ahead has had the same socket
    try:
        pkgutil.resolve_name(service.function)(fds[0], **service.options)
    except BaseException as error:  # SystemExit, too: the agent reads it after our exit
        os.write(errors, _described(error).encode(errors="replace"))
        os._exit(1)
    os._exit(0)


def _described(error: BaseException) -> str:
    """Return the type and the text of an exception, which fits into a pipe, and where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()[:_ERROR_CHARS]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({os.path.basename(frame.filename)}, line {frame.lineno})"


# ── running ──────────────────────────────────────────────────────────────────────────────────────


def _run(
    control: socket.socket, reader: framing.FrameReader, start: msg.RankStart, fds: Sequence[int]
) -> int:
    """Be a rank; one that has set up for inference may be the same rank of later gangs, too."""
    from hydrogen_magic.node.worker import main_thread

    main_thread.hide_our_frames()
    try:
        process_setup.enter_environment(start)
        rank = _Rank(control, reader, start, fds, _nothing_kept(start.options))
    except Exception as error:  # a missing working directory, modules that cannot be read
        _report_start(control, start, error)
        return 1
    code = rank.run()
    while rank.is_retained:
        received = _next_start(reader)
        if received is None:
            rank.leave()
            return 0
        later, fds = received
        process_setup.asked_to_stop.forget()
        process_setup.update_environment(start.env, later.env)
        rank, start = _Rank(control, reader, later, fds, rank.kept), later
        code = rank.run()
    return code


def _next_start(reader: framing.FrameReader) -> tuple[msg.RankStart, Sequence[int]] | None:
    """Wait for the rank's next gang; None if it is no longer needed."""
    while (received := framing.receive(reader)) is not None:
        message, fds = received
        command = msg.decode(message, msg.WorkerCommand)
        if isinstance(command, msg.RankStart):
            return command, fds
        framing.close_all(fds)  # for the gang that has just ended
    return None


def _report_start(control: socket.socket, start: msg.RankStart, error: Exception) -> None:
    """Report why the rank could not start."""
    from hydrogen_magic.node.worker import main_thread

    now_s = time.monotonic() - start.clock_zero_s
    failed = ev.RankFailed(now_s, start.rank, main_thread.report_exception(error), "starting")
    framing.send(control, msg.RankEvents((ev.encode(failed),)))


@dataclass
class _Kept:
    """What a rank keeps for its next gang, a later cell of the session or ``%%infer`` of the same cell."""

    began: float
    """Unix time."""
    groups: group_recovery.ProcessGroups
    names: session_names.RankNames
    signals: user_signals.UserSignals
    set_up: rank_inference.SetUp | None = None
    displayed: Collection[str] = ()
    """Ids of displays, also of earlier cells."""


def _nothing_kept(options: msg.RankOptions) -> _Kept:
    """Return what a new process begins with."""
    from hydrogen_magic.node.worker import user_signals
    from hydrogen_magic.node.worker.session import group_recovery, session_names

    groups = group_recovery.ProcessGroups(options.group_recovery)
    names = session_names.RankNames(vars(sys.modules["__main__"]))
    return _Kept(time.time(), groups, names, user_signals.UserSignals())


class _Rank:
    """Run the cell on this rank."""

    def __init__(
        self,
        control: socket.socket,
        reader: framing.FrameReader,
        start: msg.RankStart,
        fds: Sequence[int],
        kept: _Kept,
    ) -> None:
        from hydrogen_magic.node.worker import observe
        from hydrogen_magic.node.worker.reporting import profiler
        from hydrogen_magic.node.worker.session import entered_collectives, peer_timeouts

        self.rank = start.rank
        self.pid = os.getpid()
        self.kept = kept
        self.groups, self.names, self.signals = kept.groups, kept.names, kept.signals
        self.closure_fd, *self.channels = fds
        options = start.options
        self.infer_options = options.infer_options
        self.session = options.session
        self.is_first = self.rank == options.spec.first_rank
        """Its value and variables are the results of the gang."""
        self.speaks_for_host = start.speaks_for_host
        self.is_debugging = options.spec.pdb
        self.is_debuggable = not options.spec.on_ranks or self.rank in options.spec.on_ranks
        self.is_retained = False
        """It waits for another gang after this one."""
        self.peer_timeouts = peer_timeouts.PeerTimeouts()
        self.control = control
        self.lock = threading.Lock()
        self.phase = "starting"
        self.reporter: reporter.Reporter = self._new_reporter(start)
        self.entered = entered_collectives.EnteredCollectives(self.reporter, self.groups)
        observe.report_failures()
        self.profiler = profiler.Profiler(
            self.reporter, lambda number, fd: self._send(msg.ProfileTrace(number), [fd])
        )
        self._follow_commands(reader, start)

    def _new_reporter(self, start: msg.RankStart) -> reporter.Reporter:
        """Return the reporter of this gang, by which the whole process reports from now on."""
        from hydrogen_magic.node.worker import api
        from hydrogen_magic.node.worker.interactive import displays
        from hydrogen_magic.node.worker.reporting import reporter, send_interval

        interval = send_interval.SendInterval(self.rank, api.world_size())
        found = reporter.Reporter(
            self.rank, start.clock_zero_s, self._send_events, interval=interval
        )
        spec = start.options.spec
        found.exchanges.rendezvous = spec.rendezvous
        found.exchanges.join_advice = start.options.join_advice
        displaying = spec.displaying
        if not displaying or self.rank in displaying:
            n_displaying = len(displaying) or api.world_size()
            queue = displays.DisplayQueue(self.rank, n_displaying, earlier=self.kept.displayed)
            found.displays, self.kept.displayed = queue, queue.ids
        reporter.install(found)
        return found

    def _follow_commands(self, reader: framing.FrameReader, start: msg.RankStart) -> None:
        """Let the reporter's thread carry out the agent's commands: recording, input, profiles."""
        from hydrogen_magic.node.worker import commands
        from hydrogen_magic.node.worker.checkpoints import checkpoint
        from hydrogen_magic.node.worker.interactive import user_input
        from hydrogen_magic.node.worker.observe import forward, span_recording

        span_recording.abandon_all()
        follow_timeline = self._record_timeline(start)
        self.reporter.is_recording = start.is_recording
        forward.follow(self.reporter.is_recording)
        self.input_line = user_input.UserInput(self.reporter)
        self.input_line.install(has_debugger=self.is_debuggable)
        checkpoint.install(
            lambda name: self._send_report(msg.SavedCheckpoint(name)),
            self.input_line.wait_until_recorded,
        )
        self._poll_commands = commands.AgentCommands(
            reader, self.reporter, self.profiler, follow_timeline, self.input_line, self._release
        ).poll
        self.reporter.on_tick = self._poll_commands if self.session is None else self._tick

    def _tick(self) -> None:
        """Do what a rank of a session does often; called on the reporter's thread."""
        self._poll_commands()
        self.entered.poll()

    def _record_timeline(self, start: msg.RankStart) -> Callable[[bool], None]:
        """Return what begins and ends the library's own timeline; a plug-in's fault costs only that."""
        if not start.timeline_recorder:
            return lambda is_recording: None
        try:
            record = pkgutil.resolve_name(start.timeline_recorder)
            follow: Callable[[bool], None] = record(start.timeline_prefix, self._send_report)
        except Exception as error:
            text = f"its library's timeline is not recorded: {type(error).__name__}: {error}"
            self.reporter.notice("warning", text)
            return lambda is_recording: None
        return follow

    def run(self) -> int:
        """Load, run, send the results; return the exit code."""
        try:
            self._start_reporting()
            self.signals.resume()
            code = self._work_or_debug()
            self.signals.defer()
        except BaseException as error:
            self.signals.defer()
            code = self._fail(error)
        framing.close_all(self.channels)  # the cell has failed before it was fed
        is_child = os.getpid() != self.pid  # the cell forked, and its child failed
        stays = self.session is not None or (self.is_retained and code == 0)
        self.is_retained = stays and not is_child
        self._report_retained(code) if self.is_retained else self._finish(is_patient=code == 0)
        return code

    def _start_reporting(self) -> None:
        if self._loaded is None:  # the reporter's thread would take longer to send it
            self._enter("loading")
        self.reporter.start()

    @property
    def _loaded(self) -> namespace.LoadedClosure | None:
        """What an earlier gang with the same closure has loaded."""
        set_up = self.kept.set_up
        return set_up.loaded if set_up is not None and self.session is None else None

    def _work_or_debug(self) -> int:
        """Work; with ``--pdb``, let the user look at an exception before it is reported."""
        try:
            if process_setup.asked_to_stop.is_set():  # before there was anything to interrupt
                raise KeyboardInterrupt
            return self._work()
        except _ScriptExitError:
            raise
        except Exception as error:
            if self.is_debugging and self.is_debuggable and os.getpid() == self.pid:
                self.reporter.phase = "debugging"  # not a failure yet that is still unwinding
                self.input_line.debug(error)
            raise

    def _report_retained(self, code: int) -> None:
        """Report that this gang is over for this process, and what it holds for the next one."""
        if code != 0:
            self.profiler.discard()
        self.peer_timeouts.restore()
        n_collectives = self.entered.count()
        self.entered.end()
        now_s = self.reporter.now_s()
        self.reporter.report(
            self.names.report(now_s, self.rank, self.groups, n_collectives, self._warn)
        )
        self.reporter.close(is_patient=code == 0, keeps_thread=True)  # which sends it
        standard_streams.flush()
        set_up = self.kept.set_up
        files = set_up.files if set_up is not None and self.session is None else {}
        self._send(msg.WorkerRetained(files, code))

    def _release(self, is_forced: bool) -> None:
        """Leave the collective that the main thread waits in; called on the reporter's thread."""
        if is_forced or self.reporter.collectives.current is not None:
            self.groups.release()

    def leave(self) -> None:
        """Leave the session, or the ranks of ``%%infer``, which have nothing to clean up."""
        if self.session is not None:
            self._finish()

    def _work(self) -> int:
        try:
            loaded = self._loaded or self._load()
        finally:  # a rank of a session stays when this fails
            os.close(self.closure_fd)
        self._enter("running")
        if self.session is not None:
            self.entered.begin()
        value = None
        if self.infer_options is not None:
            self._infer(loaded, self.infer_options)
        else:
            value = _run_script(loaded) if loaded.is_script else loaded.run()
        if os.getpid() != self.pid:  # the cell forked, and its child has no displays or results
            standard_streams.flush()
            os._exit(0)
        self._show_displays()
        self.profiler.finish()
        self._report_collectives()
        self._enter("finishing", waits=False)
        self._deliver(loaded, value)
        return 0

    def _load(self) -> namespace.LoadedClosure:
        from hydrogen_magic.node.worker import namespace
        from hydrogen_magic.node.worker.interactive import post_mortem, user_input
        from hydrogen_magic.serialization import payload

        if self.session is not None:
            self.names.start(self.rank)
            for text in self.groups.renew(self.session):
                self.reporter.notice("warning", text)
        closure = payload.from_memfd(self.closure_fd)
        loaded = namespace.load(closure, names=None if self.session is None else self.names)
        del closure
        if not loaded.calls(post_mortem.debug):
            post_mortem.forget()
        if self.is_debugging or user_input.may_ask(loaded.code()):
            self.peer_timeouts.extend()
        for text in loaded.warnings:
            self._warn(text)
        return loaded

    def _warn(self, text: str) -> None:
        """Report a warning, once for the whole host."""
        if self.speaks_for_host:
            self.reporter.post(ev.Notice(self.reporter.now_s(), "warning", text))

    def _infer(self, loaded: namespace.LoadedClosure, options: Mapping[str, Any]) -> None:
        """Predict until there is nothing left. The cell's own value is not asked for."""
        from hydrogen_magic.node.worker.inference import rank_inference

        ready = self.kept.set_up
        if ready is None or self.session is not None:
            ready = self.kept.set_up = rank_inference.set_up(loaded)
            if self.session is None:
                # These objects stay. Otherwise the garbage collector visits them again and again, which
                # takes a fifth of the time of a predict that makes a list of every row.
                gc.freeze()
        channel = self.channels.pop()
        is_done = rank_inference.serve(channel, ready.predict, options, files=ready.files)
        self.is_retained = is_done and ready.can_stay

    def _show_displays(self) -> None:
        """Show open figures, and wait until the displays are sent, at the rate that a front end can draw."""
        from hydrogen_magic.node.worker.interactive import figures

        figures.show_open()
        if self.reporter.displays is not None:
            self.reporter.displays.drain()

    def _enter(self, phase: str, *, waits: bool = True) -> None:
        """Report a phase. ``waits``: until it is sent, since the process may crash next."""
        self.phase = phase
        self.reporter.post(ev.RankPhase(self.reporter.now_s(), self.rank, phase), waits=waits)

    def _report_collectives(self) -> None:
        """Report how many collectives the cell has entered: another rank may wait in the last one."""
        now_s, entered = self.reporter.now_s(), self.reporter.collectives
        if entered.has_entered:
            count, n_joins = entered.count, entered.n_joins
            self.reporter.report(ev.CollectiveWait(now_s, self.rank, "", count, now_s, n_joins))

    def _fail(self, error: BaseException) -> int:
        """Report ``error`` before any clean-up; return the exit code."""
        from hydrogen_magic.node.worker import main_thread
        from hydrogen_magic.node.worker.interactive import figures, post_mortem, user_input

        # A handler of SIGINT that the cell has set may call sys.exit.
        stops = (KeyboardInterrupt, SystemExit, user_input.StopRequestedError)
        was_interrupted = isinstance(error, stops) or self.groups.are_released
        if was_interrupted and process_setup.asked_to_stop.is_set():
            figures.close_open()
            return _INTERRUPTED_EXIT_CODE
        if os.getpid() != self.pid:  # the cell forked: its child ends like any child
            return _end_child(error)
        left = error.exit_code if isinstance(error, _ScriptExitError) else None
        if self.session is not None:
            post_mortem.keep(error)
        report = main_thread.report_exception(error if left is None else error.__cause__ or error)
        if isinstance(error, SystemExit) and _exit_code(error) == 0:
            report = replace(report, notes=(*report.notes, _EARLY_EXIT))
        self._report_collectives()
        now_s = self.reporter.now_s()
        self.reporter.post(ev.RankFailed(now_s, self.rank, report, self.phase, exit_code=left))
        figures.show_open()
        return left or _exit_code(error) or 1

    def _deliver(self, loaded: namespace.LoadedClosure, value: Any) -> None:
        """Send the results, and report that they are complete: from then on the process should exit."""
        from hydrogen_magic.node.worker.results import results

        nbytes = results.deliver(
            loaded,
            value,
            self.is_first,
            self._send_result,
            self._report_progress,
            lambda text: self._send(msg.PackingResult(text)),  # at once: the process may crash next
            self.session,
        )
        self.names.are_results_sent = True
        self._send(msg.ResultsDelivered(nbytes))

    def _send_result(
        self, part: msg.ResultPart, section: Payload, on_write: Callable[[int], None]
    ) -> None:
        from hydrogen_magic.serialization import payload

        fd = payload.to_memfd(section, f"result-{self.rank}", on_write)
        try:
            self._send(part, [fd])
        finally:
            os.close(fd)

    def _report_progress(self, text: str) -> None:
        self.reporter.report(ev.RankPhase(self.reporter.now_s(), self.rank, self.phase, text))

    def _finish(self, *, is_patient: bool = False) -> None:
        """Run exit handlers as the interpreter would, but skip its slow teardown of modules."""
        from hydrogen_magic.node.worker import exit_threads

        if os.getpid() == self.pid:  # the cell forked: what is left to send is the parent's
            self.reporter.close(is_patient=is_patient)
            exit_threads.report_later(lambda names: self._send_report(msg.ThreadsRunning(names)))
        # The agent, which looks for them once a second, may not have seen them.
        children = processes.family(os.getpid()) - {os.getpid()}
        try:
            _run_exit_handlers(self.names.loop)
        except KeyboardInterrupt:
            pass  # the gang was stopped meanwhile
        except BaseException as error:
            _print_exception(error)
        if children:
            processes.unlink_shared_memory(processes.ended(children), self.kept.began)

    def _send(self, message: msg.WorkerReport, fds: Sequence[int] = ()) -> None:
        with self.lock:
            framing.send(self.control, message, fds)

    def _send_events(self, batch: Sequence[ev.Event]) -> None:
        self._send(msg.RankEvents(tuple(map(ev.encode, batch))))

    def _send_report(self, message: msg.WorkerReport) -> None:
        """Send an event about the user's call; an agent that has exited is not the user's error."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(message)


class _ScriptExitError(Exception):
    """A script called ``sys.exit`` with a code other than success."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def _run_script(loaded: Any) -> Any:
    """Run a script or module: ``sys.exit(0)`` is a normal end, as for ``python``."""
    try:
        return loaded.run()
    except SystemExit as error:
        code = _exit_code(error)
        _print_message(error)
        if code != 0:
            raise _ScriptExitError(code) from error
        return None


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``, as the interpreter computes it."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _print_message(error: SystemExit) -> None:
    """Print the interpreter's message: the argument of ``sys.exit("message")``."""
    if not isinstance(error.code, (int, type(None))):
        print(error.code, file=sys.stderr)


def _end_child(error: BaseException) -> int:
    """Return the exit code of a process that the cell forked, and that ends with ``error``."""
    _print_message(error) if isinstance(error, SystemExit) else _print_exception(error)
    return _exit_code(error)


def _run_exit_handlers(loop: session_loop.SessionLoop) -> None:
    _skip_compile_times()
    loop.close()
    threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads
    atexit._run_exitfuncs()


def _skip_compile_times() -> None:
    """Leave out an exit handler of torch that writes a table to a logger which ignores it, in 30 ms."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    handler = getattr(dynamo, "dump_compile_times", None)
    if handler is not None and not logging.getLogger("torch._dynamo.utils").isEnabledFor(
        logging.INFO
    ):
        atexit.unregister(handler)


process_setup.let_interrupt(_Rank._work_or_debug.__code__, _run_exit_handlers.__code__)
