"""``%gang``: lists, shows and ends this kernel's gangs and recorded ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hydrogen_magic.core import run_log
from hydrogen_magic.driver import attending, history, known_gangs, run_names, session
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.owner.connection import attach
from hydrogen_magic.driver.owner.recorded_gang import RecordedGang
from hydrogen_magic.driver.rank_logs import RankLogs
from hydrogen_magic.driver.state.collective_waits import late_in_all
from hydrogen_magic.driver.state.failure_report import report
from hydrogen_magic.driver.state.formatting import late_text
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import clean, final_lines
from hydrogen_magic.errors import GangTimeoutError, HydrogenError
from hydrogen_magic.notebook.arguments.gang import GangCommand
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.notebook.outliving import attachable_lines
from hydrogen_magic.views import draws_html, draws_widgets, pick_view
from hydrogen_magic.views.output_stream import OutputStream
from hydrogen_magic.views.tables import gangs_table, sessions_table
from hydrogen_magic.views.text_table import gang_lines

_LISTED_RUNS = 10
"""Recorded runs in a list: about as many as a person remembers."""


def manage(command: GangCommand, write: Callable[[str], Any] | None = None) -> Any:
    """Carry out ``command``, writing text with ``write``, by default to stdout.

    Returns rank 0's value for ``wait``, otherwise None. ArgumentsError: there is no such gang.
    """
    put = write or OutputStream().write
    return _VERBS[command.verb](command, lambda lines: put("".join(f"{x}\n" for x in lines)))


def _list(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    states, running = history.states(_LISTED_RUNS), session.sessions()
    unreadable = history.unreadable_line()
    if not states and (why := run_log.why_inaccessible()):
        raise ArgumentsError(why)
    if not states and not unreadable:
        say(["no gang has run yet: start one with %%distributed"])
    tables = [gangs_table(states)] * bool(states) + [sessions_table(running)] * bool(running)
    text = "\n\n".join("\n".join(table.lines()) for table in tables)
    if tables and draws_html():  # lines of text would wrap
        from hydrogen_magic.views.widget.display import CellOutput

        html = "\n".join(table.html() for table in tables)
        CellOutput().show({"text/plain": text, "text/html": html})
    elif tables:
        say([text])
    say([*filter(None, [unreadable]), *attachable_lines()])


def _show(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    gang = _find(command.gang)
    state = gang.snapshot()
    if draws_widgets() or (draws_html() and state.is_terminal):
        _draw(gang, state)
        return
    say(gang_lines(state, state.now_s, 100))
    if state.state == "FAILED":
        logs = RankLogs(gang.folder, gang.events())
        last = [] if state.culprit is None else logs.last_lines(state.culprit)
        say(["", *report(state, last).splitlines()])


def _draw(gang: Gang, state: GangState) -> None:
    """Show a gang in a notebook again: its final state, or a second view while it runs, here or elsewhere."""
    view = pick_view(gang, detached=True)
    if not state.is_terminal:
        attending.follow(gang, view)
        return
    view.update(state, gang.events())
    view.close(state)


def _attach(command: GangCommand, say: Callable[[list[str]], Any]) -> Gang:
    name = command.gang or (_last_outliving_here() if command.out else None)
    gang = known_gangs.register(
        reachable(name or _newest_outliving(bool(command.out)), command.wants)
    )
    if not command.out:
        attending.follow(gang, pick_view(gang, detached=True))
    return gang


def _compare(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    from hydrogen_magic.views.comparison import MOST_RUNS, Comparison

    gangs = list({gang.id: gang for gang in map(_find, command.compared)}.values())
    if len(gangs) == 1 < len(command.compared):
        named = " and ".join(command.compared)
        raise ArgumentsError(f"%gang compare: {named} are the same run, {gangs[0].id}")
    if not 2 <= len(gangs) <= MOST_RUNS:
        raise ArgumentsError(f"%gang compare needs 2 to {MOST_RUNS} runs, got {len(gangs)}")
    comparison = Comparison(gangs)
    if draws_html():
        comparison.display()
    else:
        say(comparison.lines(time.time()))


def _stop(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    if not command.all:
        say([_stopped(command.gang, command)])
        return
    running = [k for k, gang in known_gangs.gangs().items() if not gang.snapshot().is_terminal]
    say([_stopped_or_why_not(name, command) for name in running] or ["this kernel runs no gang"])
    say(list(attachable_lines(running_alone=True)))


def _stopped_or_why_not(name: str, command: GangCommand) -> str:
    """Stop a gang beside others, which a refusal must not leave running."""
    try:
        return _stopped(name, command)
    except HydrogenError as error:
        return str(error)


def _stopped(name: str | None, command: GangCommand) -> str:
    gang = reachable(name, command.wants, to_stop=True)
    state = gang.snapshot()
    if state.is_terminal:
        return f"gang {gang.id} has already ended: {state.state}"
    gang.stop(kill=command.kill)
    return f"stopping gang {gang.id}"


def _end(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    running = {one.title: one for one in session.sessions()}
    name = command.session or (next(iter(running)) if len(running) == 1 else None)
    if name not in running:
        known = f"the sessions are {', '.join(running)}" if running else "no session is running"
        asked = f"%gang end {command.session}" if command.session else "%gang end NAME"
        raise ArgumentsError(f"{asked}: {known}")
    running[name].end()
    say([f"session {name!r} has ended{running[name].loss}"])


def _logs(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    gang = _find(command.gang)
    logs = gang.logs
    for rank in _ranks(command, logs):
        if command.rank is None and len(logs) > 1:
            say([f"── rank {rank} ──"])
        say(final_lines(logs[rank]) or [f"rank {rank} wrote nothing"])


def _stacks(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    gang = _find(command.gang)
    stacks, state = gang.stacks(), gang.snapshot()
    if not stacks:
        why = f"has no running rank to report stacks: it is {state.state}"
        if any(rank.phase == "running" for rank in state.ranks):
            why = (
                "runs, but no stacks have been taken: `%gang stacks` in its notebook, or Stacks in its live "
                "view, takes them"
            )
        say([f"gang {gang.id} {why}"])
        return
    ranks = _ranks(command, stacks)
    if gang.snapshot().is_terminal:
        say([f"gang {gang.id} has ended: its last stacks, taken while it ran"])
    for rank in ranks:
        say([f"── rank {rank} ──", *(clean(line) for line in stacks[rank].splitlines())])


def _timeline(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    gang = _find(command.gang)
    file = command.file or f"{gang.id}.json"
    try:
        path = gang.timeline(file)
    except OSError as error:
        raise ArgumentsError(f"-o {file}: the timeline could not be written: {error}") from None
    lines = [f"wrote {path}: open it in https://ui.perfetto.dev"]
    state = gang.snapshot()
    late = late_in_all({rank.rank: rank.waits for rank in state.ranks})
    if late is not None:
        lines.append(late_text(late))
    say(lines + [f"written by {state.rendezvous} itself: {kept}" for kept in gang.kept_timelines])


def _wait(command: GangCommand, say: Callable[[list[str]], Any]) -> Any:
    return waited(command).result


def waited(command: GangCommand, wants: str = "control") -> Gang:
    """Return the gang that is meant after its end; GangTimeoutError if that takes too long."""
    gang = reachable(command.gang, wants)
    if not gang.wait(command.timeout_s):
        raise GangTimeoutError(f"gang {gang.id} is still running after {command.timeout_s:g} s")
    return gang


def _doctor(command: GangCommand, say: Callable[[list[str]], Any]) -> None:
    examine(say)


def examine(say: Callable[[list[str]], Any]) -> bool:
    """Show each check of this machine as soon as it is made; return whether all of them pass."""
    from hydrogen_magic.notebook import doctor

    is_well = True
    for check in doctor.examine():
        say(check.lines())
        is_well &= check.is_well
    return is_well


_VERBS: Mapping[str, Callable[[GangCommand, Callable[[list[str]], Any]], Any]] = {
    "list": _list,
    "show": _show,
    "attach": _attach,
    "stop": _stop,
    "end": _end,
    "logs": _logs,
    "stacks": _stacks,
    "compare": _compare,
    "timeline": _timeline,
    "wait": _wait,
    "doctor": _doctor,
}


# ── finding a gang ───────────────────────────────────────────────────────────────────────────────


def reachable(name: str | None, wants: str = "control", *, to_stop: bool = False) -> Gang:
    """Return a gang of this kernel, or attach to one that outlives its kernel.

    None: this kernel's last one, else the newest. ``wants``: see :attr:`GangCommand.wants`;
    ``to_stop``: see :func:`_complete`.
    """
    live = known_gangs.gangs()
    _refuse_unreadable(name, live)
    known = run_names.names(live, (found for found in run_log.recent() if found.launched.outlives))
    if not known:
        _refuse_out_of_reach(name, known)
        why = (
            run_log.why_inaccessible()
            or "no gang can be reached from here: start one with %%distributed"
        )
        raise ArgumentsError(why)
    if name is None and live:
        name = next(reversed(live))
    try:
        found = _complete(name, known, "that can be reached from here", to_stop=to_stop)
    except ArgumentsError:
        _refuse_out_of_reach(name, known)
        raise
    gang = live.get(found)
    is_attached = gang is None or (wants == "take" and gang.snapshot().outlives)
    return attach(found, wants) if is_attached else live[found]


def _refuse_out_of_reach(name: str | None, known: Mapping[str, str]) -> None:
    """Raise ArgumentsError if ``name`` is that of a recorded gang, none of ``known``."""
    recorded = {one.gang: one for one in run_log.recent()}
    try:
        found = _complete(name, run_names.names({}, recorded.values()), "")
    except (ArgumentsError, IndexError):
        return
    if name is None or found in known:
        return
    one = recorded[found]
    is_here = not run_log.is_elsewhere(one.launched)
    is_over = one.ended is not None or (is_here and run_log.is_over(one))
    why = "has ended" if is_over else "belongs to another kernel"
    raise ArgumentsError(
        f"gang {found} ({one.launched.name}) {why}, and was started without --outlive: %gang show {found} "
        "shows its record"
    )


def _last_outliving_here() -> str | None:
    """Return the gang that outlives its kernel which this one has launched or attached to last."""
    live = known_gangs.gangs()
    return next((k for k in reversed(live) if live[k].snapshot().outlives), None)


def _newest_outliving(has_results: bool) -> str | None:
    """Return the newest run that outlives its kernel: one that still runs, if its results are not asked
    for.
    """
    found = [one for one in run_log.recent() if one.launched.outlives]
    running = [one for one in found if not has_results and not run_log.is_over(one)]
    return next((one.gang for one in (*running, *found)), None)


def _find(name: str | None) -> Gang:
    """Return a gang of this kernel or a recorded one; None: this kernel's last one, else the newest."""
    live = known_gangs.gangs()
    if name is None and live:
        return live[next(reversed(live))]
    _refuse_unreadable(name, live)
    known = run_names.names(live, run_log.recent())
    if not known:
        line = history.unreadable_line() or "no gang has run yet: start one with %%distributed"
        raise ArgumentsError(line)
    found = _complete(name, known, "")
    return live.get(found) or RecordedGang(found)


def _refuse_unreadable(name: str | None, live: Mapping[str, Gang]) -> None:
    """Raise ArgumentsError if ``name`` is the ID of a run whose record cannot be read."""
    why = "" if name is None or name in live else run_log.why_unreadable(name)
    if why:
        raise ArgumentsError(why)


def _complete(
    name: str | None, known: Mapping[str, str], whose: str, *, to_stop: bool = False
) -> str:
    """Return what :func:`run_names.complete` returns; raises ArgumentsError."""
    try:
        return run_names.complete(name, known, whose, to_stop=to_stop)
    except HydrogenError as error:
        raise ArgumentsError(str(error)) from None


def _ranks(command: GangCommand, there: Mapping[int, str]) -> list[int]:
    """Return the rank that the command names, or all. Raises ArgumentsError if it is not ``there``."""
    if command.rank is None:
        return sorted(there)
    if command.rank not in there:
        known = ", ".join(map(str, sorted(there)))
        raise ArgumentsError(
            f"--rank {command.rank}: nothing is known of this rank; known ranks: {known}"
        )
    return [command.rank]
