"""Common parts of the magics' lines: splitting, options, and error messages."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

from hydrogen_magic import plugins
from hydrogen_magic.core.argument_types import (
    choice,
    displaying_ranks,
    env_variable,
    new_file,
    not_one_of,
    parse_duration_s,
    parse_size_bytes,
    rank_numbers,
    ranks,
    run_name,
    typed,
    variable_names,
    whole_number,
)
from hydrogen_magic.core.job import DEFAULT_SESSION, JobSpec
from hydrogen_magic.core.units import counted


class ArgumentsError(ValueError):
    """A magic's line is wrong; the message has the given text and the correct form."""


class LineParser(argparse.ArgumentParser):
    """Raises instead of exiting the process, which is the kernel here."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(message.removeprefix("argument "))


# ── options ──────────────────────────────────────────────────────────────────────────────────────


def add_where(parser: LineParser) -> None:
    """Add options for the number of ranks and their placement."""
    add = parser.add_argument
    add(
        "-n",
        "--np",
        type=typed(ranks),
        metavar="N",
        help="number of ranks; -N: N ranks on this machine",
    )
    add(
        "--on",
        type=choice(plugins.PLACEMENTS),
        metavar="|".join(plugins.PLACEMENTS),
        help="where the ranks run",
    )
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--gpu", action="store_true", default=None, help="a GPU for every rank")
    gpu.add_argument("--cpu", dest="gpu", action="store_false", default=None, help="no GPU visible")
    add(
        "--env",
        action="append",
        type=typed(env_variable),
        default=[],
        metavar="K=V",
        help="environment variable of every rank; repeatable",
    )
    add(
        "--seed",
        type=whole_number(bits=63),  # torch accepts it with the number of a rank added, too
        metavar="N",
        help="rank r seeds Python, NumPy and torch with N + r",
    )


def add_cluster(parser: LineParser) -> None:
    """Add options for the hosts and slots of a cluster."""
    hosts = parser.add_mutually_exclusive_group()
    few, many = (f"as {n} hosts of a cluster as possible" for n in ("few", "many"))
    hosts.add_argument("--pack", action="store_true", default=None, help=few)
    hosts.add_argument("--spread", dest="pack", action="store_false", default=None, help=many)
    parser.add_argument(
        "--wait",
        dest="wait_s",
        type=typed(parse_duration_s),
        metavar="S",
        help="wait for hosts and slots of a cluster",
    )


def add_session(parser: LineParser, has_ranks: bool = True) -> None:
    """Add options for ranks that stay between cells; ``has_ranks``: some of them may run the cell."""
    add = parser.add_argument
    add(
        "--session",
        nargs="?",
        const=DEFAULT_SESSION,
        type=typed(run_name),
        metavar="NAME",
        help="run on ranks that stay, with their variables, for later cells",
    )
    if has_ranks:
        add(
            "--ranks",
            dest="on_ranks",
            type=typed(rank_numbers),
            metavar="R[,R]",
            help="in a session: the ranks that run the cell; without one: those that may open the debugger",
        )
    add(
        "--push",
        action="extend",
        type=typed(variable_names),
        default=[],
        metavar="NAME[,NAME]",
        help="send the notebook's value, also if the ranks of the session changed theirs",
    )
    add(
        "--idle",
        dest="idle_s",
        type=typed(parse_duration_s),
        metavar="S",
        help="end the session after S seconds without a cell (also 5m, 1h)",
    )


def add_limits(parser: LineParser) -> None:
    """Add options for limits of time and size."""
    add = parser.add_argument
    add("--retries", type=whole_number(), metavar="N", help="restarts of the gang after a failure")
    for option, dest, text in (
        ("--timeout", "timeout_s", "stop the gang after S seconds (also 5m, 1h)"),
        (
            "--start-timeout",
            "start_timeout_s",
            "how long a rank may take to reach the cell's first line",
        ),
        ("--grace", "grace_s", "how long a stopped rank may clean up"),
    ):
        add(option, dest=dest, type=typed(parse_duration_s), metavar="S", help=text)
    add(
        "--max-closure",
        dest="max_closure_bytes",
        type=typed(parse_size_bytes),
        metavar="SIZE",
        help="size limit of captured data, such as 2GB",
    )


def add_display(parser: LineParser) -> None:
    """Add options for the display."""
    add = parser.add_argument
    spans = "record from the start how ranks spend their time; FILE: write it as Chrome trace JSON"
    file = typed(lambda text: text and new_file(text))
    add("--timeline", nargs="?", const="", type=file, metavar="FILE", help=spans)
    add("--name", type=typed(run_name), metavar="NAME", help="name of the run in lists")
    add(
        "--display",
        type=typed(displaying_ranks),
        metavar="all|R[,R]",
        help="ranks whose displays and figures are shown",
    )
    add("--pdb", action="store_true", default=None, help="debug a rank that fails")
    add("--detach", action="store_true", help="return at once; the gang runs in the background")
    add("--quiet", action="store_true", default=None, help="show only output and result")
    add("--dry-run", action="store_true", help="print what would run where, and exit")
    add("-h", "--help", action="store_true", help="show this help")


# ── results ──────────────────────────────────────────────────────────────────────────────────────


def spec_of(found: argparse.Namespace, defaults: JobSpec) -> JobSpec:
    """Return ``defaults`` with the options of the line, and their effects on each other."""
    try:
        chosen = replace(defaults, **_chosen(found))
        plugins.check_variables(chosen)
        return _checked(chosen, found)
    except ValueError as error:
        raise ArgumentsError(str(error)) from None


def given_by(found: argparse.Namespace) -> frozenset[str]:
    """Return the fields of :class:`JobSpec` that the line sets."""
    implied = {"placement"} if found.np is not None and found.np < 0 else set()
    return frozenset(_chosen(found)) | implied


def _chosen(found: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of :class:`JobSpec` that the line sets: an option's ``dest`` is its field."""
    names = {field.name for field in fields(JobSpec)} - {"out"}  # its meaning differs by magic
    given = {name: value for name, value in vars(found).items() if name in names}
    given["np"] = abs(found.np) if found.np is not None else None
    given["placement"] = found.on
    given["push"] = tuple(dict.fromkeys(getattr(found, "push", ()))) or None
    given["env"] = tuple(dict(found.env).items()) or None
    given["detach"] = found.detach or None
    return {name: value for name, value in given.items() if value is not None}


def _checked(spec: JobSpec, found: argparse.Namespace) -> JobSpec:
    """Return ``spec`` with what its options imply. Raises ArgumentsError if two contradict each other."""
    _check_session(spec, found)
    if found.np is not None and found.np < 0:
        spec = _on_this_machine(spec, found)
    placement = plugins.placement(spec.placement)
    if isinstance(placement, plugins.InKernelPlacement):
        return _inside_kernel(spec, found)
    spec = _outliving(spec, placement) if spec.outlive else spec
    return _without_input_line(spec, found) if spec.detach and spec.pdb else spec


def _check_session(spec: JobSpec, found: argparse.Namespace) -> None:
    if spec.session is not None:
        return
    is_infer = hasattr(found, "frame")  # its ranks stay in any case
    for option, name in [("--push", "push"), *([] if is_infer else [("--idle", "idle_s")])]:
        if getattr(found, name, None) not in (None, []):
            raise ArgumentsError(f"{option} belongs to a session: add --session, or drop it")


def _on_this_machine(spec: JobSpec, found: argparse.Namespace) -> JobSpec:
    if found.on not in (None, "local"):
        raise ArgumentsError(
            f"--np {found.np} means {counted(-found.np, 'rank')} on this machine, which contradicts --on "
            f"{found.on}: write --np {-found.np} --on {found.on}, or drop --on"
        )
    return replace(spec, placement="local")


def _inside_kernel(spec: JobSpec, found: argparse.Namespace) -> JobSpec:
    if found.np not in (None, 1):
        raise ArgumentsError(
            f"--on {spec.placement} runs one rank inside the kernel, so --np {found.np} is not "
            "possible: drop --np, or use --on local"
        )
    if spec.detach or spec.outlive:
        option = "--outlive" if spec.outlive else "--detach"
        raise ArgumentsError(
            f"{option} is not possible with --on {spec.placement}, which runs inside the kernel: drop "
            "one of the two"
        )
    return replace(spec, np=1)


def _outliving(spec: JobSpec, placement: plugins.Planner) -> JobSpec:
    if placement.ends_with_kernel:
        raise ArgumentsError(
            f"--outlive is not possible with --on {spec.placement}: {placement.ends_with_kernel}"
        )
    if spec.session is not None:
        raise ArgumentsError(
            "--outlive cannot be combined with --session: a session ends with its kernel"
        )
    return replace(spec, detach=True)


def _without_input_line(spec: JobSpec, found: argparse.Namespace) -> JobSpec:
    """Return ``spec`` without the debugger, which ``%pdb on`` may have asked for in all cells."""
    if found.pdb:
        option = "--outlive" if spec.outlive else "--detach"
        raise ArgumentsError(
            f"--pdb cannot be combined with {option}: the debugger reads from the input line of the "
            f"cell, which does not wait for this gang; drop --pdb or {option}"
        )
    return replace(spec, pdb=False)


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def split(line: str) -> list[str]:
    """Split like a shell, up to a comment: a ``#`` that begins a word and is not quoted."""
    text = io.StringIO(line)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would cut ``COLOR=#fff`` too
    found: list[str] = []
    try:
        while not line[text.tell() :].lstrip(lexer.whitespace).startswith("#"):
            word = lexer.get_token()
            if word is None:
                break
            found.append(word)
    except ValueError:
        raise ArgumentsError(f"unclosed quotation mark in: {line.strip()}") from None
    return found


def options_of(parser: LineParser) -> list[str]:
    """Return all option strings of the parser."""
    return [name for action in parser._actions for name in action.option_strings]


def unknown_message(word: str, words: Sequence[str], parser: LineParser, cells: LineParser) -> str:
    """Return the error message for ``word``, an unknown one of the line's ``words``.

    ``cells``: the parser of ``%%distributed``, which may know the option.
    """
    options = options_of(parser)
    option = word.partition("=")[0]
    if word.startswith("-"):
        if option in options_of(cells):
            return f"{parser.prog} has no {option}: it is an option of {cells.prog}"
        return f"unknown option {option}: {not_one_of(word, options)}"
    unexpected = f"unexpected argument {word!r}"
    if listed := list_with_spaces(word, words):
        return f"{unexpected}; write a list without spaces: {listed}"
    if re.fullmatch(r"\d+", word):
        return f"{unexpected}; did you mean --np {word}?"
    name, equals, value = word.partition("=")
    if equals and f"--{name}" in options:
        return f"{unexpected}; did you mean --{name} {value}?"
    if word.endswith(".py") and parser.prog == "%%distributed":
        return (
            f"{unexpected}; %%distributed runs this cell. To run the script, "
            f"write %distributed {word} (one %)"
        )
    return (
        f"{unexpected}; {parser.prog} takes only options. Write values without spaces, as in --out a,b "
        f"and --timeout 3s, or in quotation marks; {parser.prog} --help lists the options"
    )


def list_with_spaces(word: str, words: Sequence[str]) -> str | None:
    """Return the list of which ``word`` is a later element, without the spaces after its commas."""
    pattern = rf"(?:\S+, )+{re.escape(word)}(?!\S)(?:(?<=,) \S+)*"
    found = re.search(pattern, " ".join(words))
    return found[0].replace(" ", "") if found else None
