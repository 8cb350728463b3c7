"""The cause of a failure as text: the culprit's own lines first, the victims in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from hydrogen_magic.core.events import ErrorReport, Frame, RankExited, RankFailed, without_middle
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.state.culprit import (
    DIFFERENT_TENSORS,
    JOINING,
    collective_of,
    failed_independently,
    is_collective,
    is_victim_error,
    left_collective,
    missed_collective,
)
from hydrogen_magic.driver.state.formatting import ranks_text
from hydrogen_magic.driver.state.gang_state import GangState, RankState
from hydrogen_magic.driver.state.output_lines import clean, clean_name, final_lines

_LONGEST_MESSAGE = 4000
"""Maximum characters of an exception's message; a tensor's repr would bury the rest."""
_LONGEST_LINE = 320
"""The same in a headline."""
_MOST_OUTPUT_LINES = 10
_LONGEST_OUTPUT = 1000
"""Characters of one of these lines."""
_MOST_FRAMES = 12
"""Frames of one exception; more is a recursion."""


def report(state: GangState, last_output: Sequence[str] = (), saved_results: str = "") -> str:
    """Return what a notebook shows for a failed gang, without colours of our own.

    ``last_output`` are the culprit's last lines, without line ends; only the last ten are shown.
    ``saved_results`` names the location of results that arrived.
    """
    if state.culprit is None or not 0 <= state.culprit < len(state.ranks):
        return f"the gang failed: {clean_name(state.reason) or 'no rank reported a reason'}"
    culprit = state.ranks[state.culprit]
    what, *how = _what_happened(culprit, state)
    lines = [what, *_where(culprit, state), *how, *_victims(state), *_output(culprit, last_output)]
    lines += [saved_results] if saved_results else []
    return "\n".join(lines)


def _where(rank: RankState, state: GangState) -> list[str]:
    """Name the host of a rank if its gang has several."""
    hosts = {other.host for other in state.ranks if other.host}
    return [f"  on host {clean_name(rank.host)}"] if rank.host and len(hosts) > 1 else []


# ── the headline ─────────────────────────────────────────────────────────────────────────────────


def headline(state: GangState, culprit: int) -> str:
    """Return the failure of a gang in one line, from its state before its other ranks are ended."""
    rank = state.ranks[culprit]
    among_ranks = "" if failed_independently(rank) else _among_ranks(state)
    return among_ranks or f"{_failed(rank)}{_how(rank)}"


def _failed(rank: RankState) -> str:
    return f"rank {rank.rank} failed: "


def _among_ranks(state: GangState) -> str:
    """Return which ranks missed which collective, "" if unknown."""
    found = missed_collective(state)
    if found is None:
        return _left(state) or _different_collectives(state)
    if found.collective == JOINING and all(state.ranks[rank].has_run for rank in found.outside):
        who, late = ranks_text(found.outside), ranks_text(found.waiting)
        return f"{who} finished before {late} had joined the process group ({JOINING})"
    whose = "its" if len(found.outside) == 1 else "their"
    entered = f"never entered the {found.collective} {whose} peers were waiting in"
    who = ranks_text(found.outside)
    return f"{who} {entered}{_why_absent(who, [state.ranks[rank] for rank in found.outside])}"


def _left(state: GangState) -> str:
    """Return which ranks had left a collective before others, "" if unknown."""
    found = left_collective(state)
    if found is None:
        return ""
    who, others = ranks_text(found.outside), ranks_text(found.waiting)
    verb = "waits" if len(found.waiting) == 1 else "wait"
    return f"{who} left the {found.collective} in which {others} {verb}: {DIFFERENT_TENSORS}"


def _why_absent(who: str, absent: Sequence[RankState]) -> str:
    if left_out := [rank.rank for rank in absent if rank.is_left_out]:
        instead = "run it on all ranks, or call the `module` of a DDP model"
        return f" (the cell leaves {ranks_text(left_out)} out: {instead})"
    if all(rank.has_run for rank in absent):
        return f" ({who} had already finished)"
    if all(rank.process_state == "T" for rank in absent):
        is_stopped = "its process is" if len(absent) == 1 else "their processes are"
        return f": {is_stopped} stopped (SIGSTOP)"
    phases = {rank.phase for rank in absent}
    early = phases <= {"waiting", "starting", "loading"}
    return f" ({who} had not reached the cell yet)" if early else ""


def _different_collectives(state: GangState) -> str:
    """Return which ranks waited where, if they cannot have waited for each other."""
    by_name: dict[str, list[int]] = {}
    for rank in state.ranks:
        by_name.setdefault(collective_of(rank), []).append(rank.rank)
    if len(by_name) < 2 or not all(map(is_collective, by_name)):
        return ""
    each = ", ".join(f"{ranks_text(ranks)} in {clean_name(n)}" for n, ranks in by_name.items())
    return f"the ranks were waiting in different collectives: {each}"


def _how(rank: RankState) -> str:
    if rank.failure is not None:
        code = rank.failure.exit_code
        return _one_line(rank.failure.error) if code is None else _script_exit(rank.failure)
    exited = rank.exited
    if exited is None:
        stopped = rank.process_state == "T"
        return "its process is stopped (SIGSTOP)" if stopped else "it did not take part"
    return _how_exited(rank, exited)


def _how_exited(rank: RankState, exited: RankExited) -> str:
    """Return ``killed by SIGSEGV``, or ``exited with status 3``, and when and why that happened."""
    hint = f" ({exited.hint})" if exited.hint else ""
    if exited.signal_name:
        return f"killed by {exited.signal_name}{_after_result(rank)}{hint}"
    is_packing = rank.exited_in == "finishing"
    before = " before it had sent all results" if is_packing else " without finishing the cell"
    return f"exited with status {exited.exit_code}{_after_result(rank) or before}{hint}"


def _after_result(rank: RankState) -> str:
    return " after its result had arrived" if rank.result_bytes is not None else ""


# ── what happened ────────────────────────────────────────────────────────────────────────────────


def _what_happened(rank: RankState, state: GangState) -> list[str]:
    if rank.failure is not None:
        title, *how = _exception(rank, rank.failure, state.cells)
    elif rank.exited is not None and not rank.exited.asked:
        title, *how = _exit(rank, rank.exited, state.cells)
    else:
        return _missing(rank, state)
    if failed_independently(rank) or not state.reason or state.reason.startswith(_failed(rank)):
        return [title, *how]
    place = _first_own_place(rank.failure.error, state.cells) if rank.failure is not None else ""
    where = f"        (rank {rank.rank}: {place})" if place else ""
    return [f"{clean_name(state.reason)}{where}", *how]


def _missing(rank: RankState, state: GangState) -> list[str]:
    """Return the lines for a rank that did not fail itself, but did not participate either."""
    title = clean_name(state.reason)
    if not title.startswith("rank"):
        is_stopped = rank.process_state == "T"
        reason = "its process is stopped (SIGSTOP)" if is_stopped else title or "no reason is known"
        title = f"{_failed(rank)}{reason}"
    stack = _stack(rank.stacks, state.cells)
    is_waiting = stack and not title.startswith(f"rank {rank.rank} ")  # for those that it names
    here = [f"  rank {rank.rank} was waiting here:"] if is_waiting else []
    return [title, *(_waited_at(state) or here), *stack]


def _waited_at(state: GangState) -> list[str]:
    errors = ((rank.rank, rank.failure.error) for rank in state.ranks if rank.failure is not None)
    places = ((rank, _first_own_place(error, state.cells)) for rank, error in errors)
    return next(([f"  rank {rank} was waiting at {place}"] for rank, place in places if place), [])


# ── exits ────────────────────────────────────────────────────────────────────────────────────────


def _exit(rank: RankState, exited: RankExited, cells: Mapping[str, str]) -> list[str]:
    was = "was " if exited.signal_name else ""
    line = f"rank {rank.rank} {was}{clean_name(_how_exited(rank, exited))}"
    if rank.exited_in == "loading":
        line += ", while loading it"
    return [line, *_stack(exited.crash_stack, cells)]


_STACK_LINE = re.compile(r'^(\s*)File "([^"]*)", line (\d+)(.*)$')


def _stack(stack: str, cells: Mapping[str, str]) -> list[str]:
    lines = (line for line in stack_lines(stack, cells) if line.strip())
    return [f"  {line}" for line in lines][:60]


def stack_lines(stack: str, cells: Mapping[str, str]) -> list[str]:
    """Return the lines of a text with a stack, with the notebook's labels for its files."""

    def line(text: str) -> str:
        match = _STACK_LINE.match(text)
        if match is None or match[2] not in cells:
            return text
        function = match[4].removeprefix(",").replace(" in ", ", in ", 1)
        return f"{match[1]}{cells[match[2]]}, line {match[3]}{function}"

    return [line(clean(text)) for text in stack.splitlines()]


_SUB_EXCEPTION = re.compile(r"(?<=\()<[^<>]+>(?=, line \d+\)$)")
"""The file at the end of a note for a part of an exception group."""


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────


def _exception(rank: RankState, failure: RankFailed, cells: Mapping[str, str]) -> list[str]:
    error = failure.error
    if failure.exit_code is not None:
        return [
            f"{_failed(rank)}{_script_exit(failure)}",
            *_frames(_oldest(error).frames, cells),
        ]
    when = {
        "starting": " while starting",
        "loading": " while loading the cell",
        "finishing": " after the cell had run",
    }
    title = f"rank {rank.rank} failed{when.get(failure.phase, '')}: {_one_line(error)}"
    place = _first_own_place(error, cells)
    return [f"{title}        ({place})" if place else title, *_chain(error, cells)]


def _script_exit(failure: RankFailed) -> str:
    message = failure.error.message
    said = f": {_headlines_part(message)}" if message not in ("", str(failure.exit_code)) else ""
    return f"the script exited with status {failure.exit_code}{said}"


def _oldest(error: ErrorReport) -> ErrorReport:
    return error if error.cause is None else _oldest(error.cause)


def _first_own_place(error: ErrorReport, cells: Mapping[str, str]) -> str:
    """Return the place in the running cell from which everything else was called."""
    own = next((frame for frame in error.frames if frame.file in cells), None)
    return f"{cells[own.file]}, line {own.line}" if own else ""


def _chain(error: ErrorReport, cells: Mapping[str, str]) -> list[str]:
    """Return the causes, oldest first, then ``error`` itself."""
    before: list[str] = []
    if error.cause is not None and not _is_repeated(error, cells):
        how = (
            "The above exception was the direct cause of the following exception:"
            if error.is_direct_cause
            else "During handling of the above exception, another exception occurred:"
        )
        before = [*_chain(error.cause, cells), "", how, ""]
    return [*before, *_frames(error.frames, cells), *_message(error, cells)]


def _is_repeated(error: ErrorReport, cells: Mapping[str, str]) -> bool:
    """Return whether the cause says the same from inside a library: pandas raises a KeyError twice."""
    cause = error.cause
    if cause is None or (cause.type, cause.message) != (error.type, error.message):
        return False
    has_own = [any(_is_own(frame, cells) for frame in each.frames) for each in (cause, error)]
    return has_own == [False, True]


def _message(error: ErrorReport, cells: Mapping[str, str]) -> list[str]:
    text = f"{error.type}: {error.message}" if error.message else error.type
    parts = [without_middle(part, _LONGEST_MESSAGE) for part in (text, *error.notes)]
    lines = [line for part in parts for line in stack_lines(part, cells)]
    return [_SUB_EXCEPTION.sub(lambda found: cells.get(found[0], found[0]), line) for line in lines]


def _one_line(error: ErrorReport) -> str:
    lines = error.message.rstrip().splitlines() or [""]
    # That of torch.multiprocessing begins with an empty line and ends with the cause.
    first = lines[0] or lines[-1]
    if is_victim_error(error):
        first = _GLOO_DETAILS.sub("", first)
    return _headlines_part(f"{error.type}: {first}" if first else error.type)


def _headlines_part(text: str) -> str:
    return clean_name(without_middle(text, _LONGEST_LINE))


_GLOO_DETAILS = re.compile(r"\[/\S*gloo/\S*\] |\. This is typically caused by.*")
"""Build paths of Gloo, and its advice for an unknown culprit."""


# ── frames ───────────────────────────────────────────────────────────────────────────────────────


def _frames(frames: Sequence[Frame], cells: Mapping[str, str]) -> list[str]:
    if not any(_is_own(frame, cells) for frame in frames):
        return [line for frame in frames[-3:] for line in _shown(frame, cells)]
    lines: list[str] = []
    runs = [(own, list(run)) for own, run in groupby(frames, lambda frame: _is_own(frame, cells))]
    for own, run in runs:
        if own:
            lines += [line for frame in _without_middle(run) for line in _shown(frame, cells)]
        else:
            lines.append(_folded(run))
    return lines


def _without_middle(run: Sequence[Frame]) -> Iterator[Frame]:
    if len(run) <= _MOST_FRAMES:
        yield from run
        return
    half = _MOST_FRAMES // 2
    yield from run[:half]
    n_left_out = sum(frame.n_left_out or 1 for frame in run[half:-half])
    yield Frame("", 0, "", "", n_left_out)
    yield from run[-half:]


def _shown(frame: Frame, cells: Mapping[str, str]) -> list[str]:
    if frame.n_left_out:
        return [f"  ... {counted(frame.n_left_out, 'more frame')} ..."]
    earlier = _CELL.fullmatch(frame.file)  # of a session, which sends no names of earlier cells
    place = cells.get(frame.file) or (earlier[1] if earlier else f"File {clean_name(frame.file)}")
    where = f"  {place}, line {frame.line}, in {clean_name(frame.function)}"
    return [where, *([f"      {clean_name(frame.text)}"] if frame.text else [])]


_CELL = re.compile(r"<(Cell In\[\d+\])>")
_LIBRARY = re.compile(
    r"[/\\](?:site-packages|dist-packages)[/\\](?P<installed>.*)"
    r"|[/\\]lib[/\\]python\d[\d.]*[/\\](?!site-packages|dist-packages)(?P<standard>.*)"
    r"|<frozen (?P<frozen>[^>]*)>"
    r"|^(?P<compiled>[^/\\].*\.(?:pyx|pxi))$"  # Cython's, relative to a folder that only its build had
)


def _is_own(frame: Frame, cells: Mapping[str, str]) -> bool:
    """Return whether the user wrote the line: a cell, or a file outside of installed packages."""
    return frame.file in cells or _LIBRARY.search(frame.file) is None


def _folded(run: Sequence[Frame]) -> str:
    paths = [_library_path(frame.file) for frame in run]
    shared = os.path.commonpath(paths) if len(set(paths)) > 1 else paths[0]
    # If frames are of several packages, only the one that raised is of interest.
    where = shared or paths[-1]
    last = run[-1]
    exact = f":{last.line}" if shared == paths[-1] and len(run) == 1 else ""
    return f"  ... {counted(len(run), 'frame')} in {clean_name(where)}{exact} ..."


def _library_path(file: str) -> str:
    match = _LIBRARY.search(file)
    found = next((group for group in match.groups() if group), "") if match else ""
    return (found or file).replace("\\", "/")


# ── victims and output ───────────────────────────────────────────────────────────────────────────


def _victims(state: GangState) -> list[str]:
    others = [r for r in state.ranks if r.rank != state.culprit and r.phase != "idle"]
    failed = [rank.rank for rank in others if failed_independently(rank)]
    done = [rank.rank for rank in others if rank.phase == "done"]
    stopped = [rank.rank for rank in others if rank.rank not in (*failed, *done)]
    lines = [f"{ranks_text(done)} had already finished."] if done else []
    were = "was" if len(stopped) == 1 else "were"
    lines += [f"{ranks_text(stopped)} {were} stopped."] if stopped else []
    lines += [f"{ranks_text(failed)} failed, too."] if failed else []
    said = _sayings(others)
    if said and lines:
        lines[-1] += f"   ({said})"
    return lines


def _sayings(others: Iterable[RankState]) -> str:
    """Return the victims' own errors, with equal ones grouped."""
    by_text: dict[str, list[int]] = {}
    for rank in others:
        text = _saying(rank)
        if text:
            by_text.setdefault(text, []).append(rank.rank)
    said = [f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]
    more = f"; {len(said) - 3} others" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more


def _saying(rank: RankState) -> str:
    if rank.failure is not None and rank.failure.exit_code is not None:
        return f"exit code {rank.failure.exit_code}"
    if rank.failure is not None:
        return _one_line(rank.failure.error)
    exited = rank.exited
    if exited is None or exited.asked or rank.phase == "done":
        return ""
    if exited.signal_name:
        return f"killed by {clean_name(exited.signal_name)}"
    return f"exited with status {exited.exit_code}"


def _output(culprit: RankState, lines: Sequence[str]) -> list[str]:
    final = [text for line in lines for text in final_lines(line) if text.strip()]
    shown = [without_middle(line, _LONGEST_OUTPUT) for line in final[-_MOST_OUTPUT_LINES:]]
    return (
        [f"last output of rank {culprit.rank}:", *(f"  {line}" for line in shown)] if shown else []
    )
