"""``%gang`` and its sub-commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from hydrogen_magic.core.argument_types import (
    not_one_of,
    parse_duration_s,
    typed,
    variable_names,
    whole_number,
)
from hydrogen_magic.notebook.arguments.parsing import (
    ArgumentsError,
    LineParser,
    list_with_spaces,
    options_of,
    split,
)

GANG_COMMANDS = {
    "list": ("", "gangs of this kernel, and the ten newest other recorded ones"),
    "show": ("[ID]", "state of a gang, rank by rank"),
    "attach": ("[ID] [--take] [--out NAMES]", "show and control a gang that outlives its kernel"),
    "stop": ("[ID] [--all] [--kill] [--take]", "stop a gang"),
    "logs": ("[ID] [--rank R]", "everything that the ranks wrote"),
    "stacks": ("[ID] [--rank R]", "current stack of every thread of every rank"),
    "compare": (
        "ID ID …",
        "curves of several runs in the same charts, and the values in which they differ",
    ),
    "timeline": ("[ID] -o FILE", "spans as Chrome trace JSON, to be opened in Perfetto"),
    "end": ("[NAME]", "end a session; without a name the only one"),
    "wait": ("[ID] [--timeout S]", "wait until a gang ends, and raise if it failed"),
    "doctor": ("", "check this machine: versions, GPUs, space, a two-rank all_reduce"),
}
"""Sub-commands of ``%gang``, each with its arguments and its meaning."""

_HELP = ("-h", "--help")
_LIKE_END = {"abort", "cancel", "close", "exit", "kill", "quit", "shutdown", "terminate"}
"""Words for which users look for one of two commands."""
_TO_END = "%gang stop stops a gang, %gang end ends a session"


@dataclass(frozen=True)
class GangCommand:
    """A line of ``%gang``."""

    verb: str = "list"
    """One of :data:`GANG_COMMANDS`."""
    gang: str | None = None
    """ID of a gang, its name, or the beginning of its ID; None means this kernel's last gang."""
    session: str | None = None
    """Name of the session of ``end``; None: the only one."""
    compared: tuple[str, ...] = ()
    """As :attr:`gang`, for each run of ``compare``."""
    all: bool = False
    kill: bool = False
    rank: int | None = None
    file: str | None = None
    timeout_s: float | None = None
    take: bool = False
    """Take control from another kernel."""
    out: tuple[str, ...] = ()
    """Variables of rank 0 to assign in the notebook."""

    @property
    def wants(self) -> str:
        """What a connection to the gang asks for, see :class:`hydrogen_magic.core.messages.Attach`."""
        return "take" if self.take else "control"


def parse_gang(line: str) -> GangCommand:
    """Return the parsed line of ``%gang``, or raise :class:`ArgumentsError`."""
    return parse_gang_words(split(line))


def parse_gang_words(words: Sequence[str]) -> GangCommand:
    """Return the parsed words of a line of ``%gang``, or raise :class:`ArgumentsError`."""
    if not words:
        return GangCommand()
    if words[0] in _HELP:
        raise ArgumentsError("\n".join(map(gang_usage, GANG_COMMANDS)))
    verb = words[0]
    if verb not in GANG_COMMANDS:
        advice = _TO_END if verb in _LIKE_END else not_one_of(verb, GANG_COMMANDS)
        raise ArgumentsError(f"%gang {verb} is not a command; {advice}")
    parser = gang_parser(verb)
    if any(word in _HELP for word in words):
        raise ArgumentsError(parser.format_help())
    found, unknown = parser.parse_known_args(words[1:])
    if unknown:
        subject = vars(found).get("gang") or vars(found).get("session")
        remedy = _remedy(unknown, words, parser, subject)
        raise ArgumentsError(f"%gang {verb} {unknown[0]}: {remedy}")
    given = vars(found)
    given["out"] = tuple(given.get("out") or ())
    given["compared"] = tuple(dict.fromkeys(given.get("compared", ())))
    command = GangCommand(verb=verb, **given)
    if verb == "timeline" and command.file is None:
        raise ArgumentsError("%gang timeline needs a file: %gang timeline ID -o trace.json")
    if verb == "compare" and len(command.compared) < 2:
        raise ArgumentsError("%gang compare needs two or more runs: %gang compare ID ID")
    if command.all and command.gang is not None:
        raise ArgumentsError(f"%gang stop {command.gang} --all: give an id or --all, not both")
    return command


def _remedy(
    unknown: Sequence[str], words: Sequence[str], parser: LineParser, subject: str | None
) -> str:
    """Return what to write in place of words that the parser does not know."""
    if unknown[0].startswith("-"):
        options = options_of(parser)
        return not_one_of(unknown[0], options) if options else f"{parser.prog} has no options"
    if listed := list_with_spaces(unknown[0], words):
        return f"write a list without spaces: {listed}"
    if subject is None:
        return f"{parser.prog} has no arguments"
    rest = takewhile(lambda word: not word.startswith("-"), unknown)
    name = " ".join([subject, *rest])
    return f'a name with spaces needs quotation marks: {parser.prog} "{name}"'


def gang_usage(verb: str) -> str:
    """Return a line with the arguments of a sub-command and its meaning."""
    arguments, meaning = GANG_COMMANDS[verb]
    return f"%gang {verb} {arguments}".rstrip() + f": {meaning}"


def gang_parser(verb: str) -> LineParser:
    """Return the parser of what follows a sub-command."""
    arguments, meaning = GANG_COMMANDS[verb]
    parser = LineParser(
        prog=f"%gang {verb}",
        usage=f"%(prog)s {arguments}",
        description=meaning,
        add_help=False,
        allow_abbrev=False,
    )
    _add_subject(parser, verb)
    _add_options(parser, verb)
    return parser


def _add_subject(parser: LineParser, verb: str) -> None:
    add = parser.add_argument
    if verb == "compare":
        add("compared", nargs="*", metavar="ID", help="IDs of runs, names, or beginnings of IDs")
    elif verb == "end":
        add("session", nargs="?", metavar="NAME", help="name of the session")
    elif verb not in ("list", "doctor"):
        newest = "the newest that outlives its kernel, else " if verb == "attach" else ""
        default = f"{newest}the last one of this kernel"
        text = f"ID, a name, or the beginning of an ID; default: {default}"
        add("gang", nargs="?", metavar="ID", help=text)


def _add_options(parser: LineParser, verb: str) -> None:
    add = parser.add_argument
    if verb == "stop":
        add("--all", action="store_true", help="stop every gang of this kernel")
        add("--kill", action="store_true", help="end the ranks at once, without time to clean up")
    if verb in ("logs", "stacks"):
        add("--rank", type=whole_number(), metavar="R", help="only this rank")
    if verb in ("attach", "stop"):
        add("--take", action="store_true", help="take control from another kernel")
    if verb == "attach":
        text = "assign rank 0's variables after the end, and show no view"
        add("--out", type=typed(variable_names), metavar="NAME[,NAME]", help=text)
    if verb == "timeline":
        path = os.path.expanduser
        add("-o", "--output", dest="file", type=path, metavar="FILE", help="file to write")
    if verb == "wait":
        text = "raise GangTimeoutError after S seconds (also 5m, 1h); the gang continues"
        seconds = typed(parse_duration_s)
        add("--timeout", dest="timeout_s", type=seconds, metavar="S", help=text)
