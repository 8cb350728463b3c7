"""The magics' lines, parsed to frozen values; knows neither IPython nor what options lead to."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hydrogen_magic.spec import JobSpec
from hydrogen_magic.words import (
    choice,
    count,
    env_variable,
    not_one_of,
    parse_duration_s,
    parse_size_bytes,
    python_file,
    ranks,
    typed,
    variable_names,
)

__all__ = [
    "GANG_COMMANDS",
    "PLACEMENTS",
    "RENDEZVOUS",
    "Arguments",
    "ArgumentsError",
    "GangCommand",
    "parse",
    "parse_gang",
    "usage",
]

PLACEMENTS = ("local", "spark", "inline")
RENDEZVOUS = ("torch", "horovod", "tensorflow", "jax")

GANG_COMMANDS = {
    "list": "every gang of this kernel and the recent ones before it",
    "show": "ID: its state, rank by rank",
    "stop": "ID | --all: end it (--kill: at once)",
    "logs": "ID [--rank R]: everything its ranks wrote",
    "stacks": "ID: where every thread of every rank is now",
    "timeline": "ID -o FILE: its spans as Chrome trace JSON, open in Perfetto",
    "wait": "ID [--timeout S]: wait for its end, and raise if it failed",
    "doctor": "check this machine: versions, GPUs, space, a two-rank all_reduce",
}
"""Sub-commands of ``%gang`` with their help."""


class ArgumentsError(ValueError):
    """A magic's line is wrong; the message says what was given and what would be right."""


@dataclass(frozen=True)
class Arguments:
    """A line of ``%%distributed`` or ``%distributed``."""

    spec: JobSpec
    dry_run: bool = False
    """Say what would be captured and where each rank would run; run nothing."""
    save: str | None = None
    """File that gets the cell as a script for torchrun."""
    script: str | None = None
    """Script file or module name of the line form; None for a cell."""
    script_args: tuple[str, ...] = ()
    as_module: bool = False
    """True: ``script`` is a module name (``-m``)."""
    help: bool = False
    """True: show :func:`usage` and do nothing."""


@dataclass(frozen=True)
class GangCommand:
    """A line of ``%gang``."""

    verb: str = "list"
    """One of :data:`GANG_COMMANDS`."""
    gang: str | None = None
    """Id, or the beginning of one; None means the newest gang."""
    all: bool = False
    kill: bool = False
    rank: int | None = None
    file: str | None = None
    timeout_s: float | None = None


# ── %%distributed and %distributed ───────────────────────────────────────────────────────────────


def parse(line: str, *, defaults: JobSpec | None = None, is_cell: bool = True) -> Arguments:
    """Return what ``line`` asks for, or raise :class:`ArgumentsError`.

    ``defaults`` is used for what the line does not say. With ``is_cell`` false the line must name a
    script, or a module after ``-m``; what follows that name belongs to the script.
    """
    tokens = _tokens(line)
    if not is_cell:
        tokens = _with_timeline_joined(tokens)
    found, unknown = _parser(is_cell).parse_known_args(tokens)
    if found.help:
        return Arguments(defaults or JobSpec(), help=True)
    if unknown:
        raise ArgumentsError(_unknown_message(unknown[0], is_cell))
    spec = _checked_spec(_spec(found, defaults or JobSpec()), found)
    arguments = Arguments(spec=spec, dry_run=found.dry_run, save=found.save)
    return arguments if is_cell else _with_script(arguments, found)


def usage(is_cell: bool = True) -> str:
    """Return the help text that ``--help`` shows."""
    return _parser(is_cell).format_help()


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process, which is the kernel here."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(message.removeprefix("argument "))


def _parser(is_cell: bool) -> _Parser:
    parser = _Parser(
        prog="%%distributed" if is_cell else "%distributed",
        usage=None if is_cell else "%(prog)s [options] script.py [args] | -m module [args]",
        description="Run this cell on every rank of a new gang."
        if is_cell
        else "Run a script or module on every rank of a new gang; torchrun's work unchanged.",
        add_help=False,
        allow_abbrev=False,
    )
    _add_where(parser)
    _add_limits(parser)
    _add_shown(parser)
    if not is_cell:
        rest = argparse.REMAINDER
        parser.add_argument("-m", dest="module", nargs=rest, help="module to run, its arguments")
        parser.add_argument("command", nargs=rest, help="script to run, its arguments")
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--np", type=typed(ranks), metavar="N", help="ranks; -N: N ranks on this machine")
    add("--on", type=choice(PLACEMENTS), metavar="|".join(PLACEMENTS), help="placement")
    add("--with", dest="rendezvous", type=choice(RENDEZVOUS), metavar="|".join(RENDEZVOUS),
        help="how ranks find each other")  # fmt: skip
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--gpu", action="store_true", default=None, help="a GPU for every rank")
    gpu.add_argument("--cpu", dest="gpu", action="store_false", default=None, help="no GPU visible")
    add("--env", action="append", type=typed(env_variable), default=[], metavar="K=V",
        help="environment variable of every rank; repeatable")  # fmt: skip


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--retries", type=typed(count), metavar="N", help="restarts of the gang after a failure")
    add("--timeout", dest="timeout_s", type=typed(parse_duration_s), metavar="S",
        help="stop the gang after S seconds (also 5m, 1h)")  # fmt: skip
    add("--start-timeout", dest="start_timeout_s", type=typed(parse_duration_s), metavar="S",
        help="how long a rank may take to its first line")  # fmt: skip
    add("--grace", dest="grace_s", type=typed(parse_duration_s), metavar="S",
        help="how long a stopped rank may clean up")  # fmt: skip
    add("--max-closure", dest="max_closure_bytes", type=typed(parse_size_bytes), metavar="SIZE",
        help="bound of everything captured: 2GiB")  # fmt: skip


def _add_shown(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", action="append", type=typed(variable_names), default=[], metavar="NAME[,NAME]",
        help="rank 0's variables to bring back")  # fmt: skip
    add("--timeline", nargs="?", const="", metavar="FILE", help="record spans")
    add("--save", type=typed(python_file), metavar="FILE.py", help="also write a script")
    add("--detach", action="store_true", help="return a Gang at once")
    add("--quiet", action="store_true", default=None, help="only output and result")
    add("--dry-run", action="store_true", help="say what would run where; run nothing")
    add("-h", "--help", action="store_true", help="show this")


def _spec(found: argparse.Namespace, defaults: JobSpec) -> JobSpec:
    given = {
        "np": abs(found.np) if found.np is not None else None,
        "placement": found.on,
        "env": tuple(dict(found.env).items()) or None,
        "out": tuple(dict.fromkeys(name for names in found.out for name in names)) or None,
        "detach": found.detach or None,
    }
    same = ("rendezvous", "gpu", "retries", "timeout_s", "start_timeout_s", "grace_s", "timeline",
            "quiet", "max_closure_bytes")  # fmt: skip
    given.update((name, getattr(found, name)) for name in same)
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, **chosen)


def _checked_spec(spec: JobSpec, found: argparse.Namespace) -> JobSpec:
    """Return ``spec`` with what its parts imply for each other, or raise."""
    if found.np is not None and found.np < 0:
        if found.on not in (None, "local"):
            raise ArgumentsError(
                f"--np {found.np} means {-found.np} ranks on this machine, --on {found.on} says "
                f"otherwise: write --np {-found.np} --on {found.on}, or drop --on"
            )
        spec = replace(spec, placement="local")
    if spec.placement != "inline":
        return spec
    if found.np not in (None, 1):
        raise ArgumentsError(
            f"--on inline runs one rank inside the kernel, --np {found.np} asks for more: drop "
            "--np, or use --on local"
        )
    if spec.detach:
        raise ArgumentsError("--on inline runs inside the kernel, so it cannot --detach: use one")
    return replace(spec, np=1)


def _with_script(arguments: Arguments, found: argparse.Namespace) -> Arguments:
    as_module = found.module is not None
    words: Sequence[str] = found.module if as_module else found.command
    if words and words[0] == "--":  # some versions of argparse leave the separator in
        words = words[1:]
    if not words:
        example = "-m package.module" if as_module else "train.py --epochs 3"
        raise ArgumentsError(
            f"%distributed needs a script or -m module to run, as in: %distributed --np 2 {example}"
            "; for a cell write %%distributed"
        )
    if arguments.spec.out:
        raise ArgumentsError("--out brings back variables of a cell; a script has none: drop it")
    if arguments.save is not None:
        raise ArgumentsError("--save writes a cell as a script; this is one already: drop it")
    return replace(arguments, script=words[0], script_args=tuple(words[1:]), as_module=as_module)


# ── %gang ────────────────────────────────────────────────────────────────────────────────────────


def parse_gang(line: str) -> GangCommand:
    """Return what a line of ``%gang`` asks for, or raise :class:`ArgumentsError`."""
    tokens = _tokens(line)
    if not tokens:
        return GangCommand()
    if tokens[0] in ("-h", "--help"):
        raise ArgumentsError("\n".join(f"%gang {k} {v}" for k, v in GANG_COMMANDS.items()))
    verb = tokens[0]
    if verb not in GANG_COMMANDS:
        raise ArgumentsError(f"%gang {verb}: {not_one_of(verb, GANG_COMMANDS)}")
    parser = _gang_parser(verb)
    found, unknown = parser.parse_known_args(tokens[1:])
    if unknown:
        options = [name for action in parser._actions for name in action.option_strings]
        raise ArgumentsError(f"%gang {verb} {unknown[0]}: {not_one_of(unknown[0], options)}")
    command = GangCommand(verb=verb, **vars(found))
    if verb == "timeline" and command.file is None:
        raise ArgumentsError("%gang timeline needs a file: %gang timeline ID -o trace.json")
    if command.all and command.gang is not None:
        raise ArgumentsError(f"%gang stop {command.gang} --all: give an id or --all, not both")
    return command


def _gang_parser(verb: str) -> _Parser:
    parser = _Parser(prog=f"%gang {verb}", add_help=False, allow_abbrev=False)
    if verb not in ("list", "doctor"):
        parser.add_argument("gang", nargs="?")
    if verb == "stop":
        parser.add_argument("--all", action="store_true")
        parser.add_argument("--kill", action="store_true")
    if verb in ("logs", "stacks"):
        parser.add_argument("--rank", type=typed(count))
    if verb == "timeline":
        parser.add_argument("-o", "--output", dest="file")
    if verb == "wait":
        parser.add_argument("--timeout", dest="timeout_s", type=typed(parse_duration_s))
    return parser


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def _tokens(line: str) -> list[str]:
    """Split like a shell does, up to a comment."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would cut ``COLOR=#fff`` too
    tokens: list[str] = []
    try:
        for token in lexer:
            if token.startswith("#"):
                break
            tokens.append(token)
    except ValueError:
        raise ArgumentsError(f"a quotation mark is not closed in: {line.strip()}") from None
    return tokens


def _with_timeline_joined(tokens: list[str]) -> list[str]:
    """Say which word belongs to ``--timeline``: before a script only a JSON file is its own."""
    if "--timeline" not in tokens:
        return tokens
    at = tokens.index("--timeline")
    before, _ = _parser(is_cell=False).parse_known_args(tokens[:at])
    if before.command or before.module is not None:
        return tokens  # it is an option of the script
    has_file = tokens[at + 1 : at + 2] and tokens[at + 1].endswith((".json", ".json.gz"))
    file = tokens[at + 1] if has_file else ""
    return [*tokens[:at], f"--timeline={file}", *tokens[at + (2 if has_file else 1) :]]


def _unknown_message(word: str, is_cell: bool) -> str:
    actions = _parser(is_cell)._actions
    options = [name for action in actions for name in action.option_strings]
    if word.startswith("-"):
        return f"unknown option {word.partition('=')[0]}: {not_one_of(word, options)}"
    if re.fullmatch(r"\d+", word):
        return f"what is {word}? For {word} ranks write --np {word}"
    name, equals, value = word.partition("=")
    if equals and f"--{name}" in options:
        return f"what is {word}? Write --{name} {value}"
    if word.endswith(".py"):
        return f"%%distributed runs this cell; to run {word} write %distributed {word} (one %)"
    return f"what is {word!r}? %%distributed takes options only: {', '.join(options)}"
