"""``%gang`` and its sub-commands."""

from __future__ import annotations

from dataclasses import dataclass

from hydrogen_magic.core.argument_types import (
    count,
    not_one_of,
    parse_duration_s,
    typed,
    variable_names,
)
from hydrogen_magic.notebook.arguments.parsing import (
    ArgumentsError,
    LineParser,
    options_of,
    split,
)

GANG_COMMANDS = {
    "list": "every gang of this kernel and the recent ones before it",
    "show": "ID: its state, rank by rank",
    "attach": "ID [--take] [--out NAMES]: show and control a gang that outlives its kernel",
    "stop": "ID | --all: stop it (--kill: at once)",
    "logs": "ID [--rank R]: everything its ranks wrote",
    "stacks": "ID: current stack of every thread of every rank",
    "compare": "ID ID …: curves of several runs in the same charts, and the values in which they differ",
    "timeline": "ID -o FILE: its spans as Chrome trace JSON, open in Perfetto",
    "end": "[NAME]: end a session; without a name the only one",
    "wait": "ID [--timeout S]: wait until it ends, and raise if it failed",
    "doctor": "check this machine: versions, GPUs, space, a two-rank all_reduce",
}
"""Sub-commands of ``%gang`` with their help."""


@dataclass(frozen=True)
class GangCommand:
    """A line of ``%gang``."""

    verb: str = "list"
    """One of :data:`GANG_COMMANDS`."""
    gang: str | None = None
    """Id of a gang, or its beginning; None means the newest gang."""
    session: str | None = None
    """Name of the session of ``end``; None: the only one."""
    compared: tuple[str, ...] = ()
    """Ids of the runs of ``compare``, or their beginnings or names."""
    all: bool = False
    kill: bool = False
    rank: int | None = None
    file: str | None = None
    timeout_s: float | None = None
    take: bool = False
    """Take control from another kernel."""
    out: tuple[str, ...] = ()
    """Variables of rank 0 to assign in the notebook."""


def parse_gang(line: str) -> GangCommand:
    """Return the parsed line of ``%gang``, or raise :class:`ArgumentsError`."""
    words = split(line)
    if not words:
        return GangCommand()
    if words[0] in ("-h", "--help"):
        raise ArgumentsError("\n".join(f"%gang {k} {v}" for k, v in GANG_COMMANDS.items()))
    verb = words[0]
    if verb not in GANG_COMMANDS:
        raise ArgumentsError(f"%gang {verb} is not a command; {not_one_of(verb, GANG_COMMANDS)}")
    parser = _gang_parser(verb)
    found, unknown = parser.parse_known_args(words[1:])
    if unknown:
        said = not_one_of(unknown[0], options_of(parser))
        raise ArgumentsError(f"%gang {verb} {unknown[0]}: {said}")
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


def _gang_parser(verb: str) -> LineParser:
    parser = LineParser(prog=f"%gang {verb}", add_help=False, allow_abbrev=False)
    if verb == "compare":
        parser.add_argument("compared", nargs="*")
    elif verb == "end":
        parser.add_argument("session", nargs="?")
    elif verb not in ("list", "doctor"):
        parser.add_argument("gang", nargs="?")
    if verb == "stop":
        parser.add_argument("--all", action="store_true")
        parser.add_argument("--kill", action="store_true")
    if verb in ("logs", "stacks"):
        parser.add_argument("--rank", type=typed(count))
    if verb in ("attach", "stop"):
        parser.add_argument("--take", action="store_true")
    if verb == "attach":
        parser.add_argument("--out", type=typed(variable_names))
    if verb == "timeline":
        parser.add_argument("-o", "--output", dest="file")
    if verb == "wait":
        parser.add_argument("--timeout", dest="timeout_s", type=typed(parse_duration_s))
    return parser
