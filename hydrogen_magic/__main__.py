"""``python -m hydrogen_magic …``: gangs from a terminal, and the set-up of libraries."""

from __future__ import annotations

import os
import pkgutil
import re
import signal
import sys
from collections.abc import Iterable, Sequence

from hydrogen_magic import plugins
from hydrogen_magic.core.argument_types import not_one_of
from hydrogen_magic.driver import attending
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.notebook import gang_command
from hydrogen_magic.notebook.arguments.gang import GangCommand, parse_gang_words
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.views import pick_view
from hydrogen_magic.views.output_stream import OutputStream

COMMANDS = {
    "gang list": "the ten newest recorded gangs, and those that run without their kernel",
    "gang show ID": "state of a gang, rank by rank",
    "gang attach ID": "follow output and state; Ctrl-C detaches, and the gang continues",
    "gang stop ID": "stop a gang (--kill: at once; --take: even if a kernel controls it)",
    "gang wait ID": "wait until a gang ends (--timeout S: at most S seconds); status 1 if it fails",
    "gang logs ID": "everything that the ranks wrote (--rank R: one rank)",
    "gang stacks ID": "stacks of every thread that were taken while it ran (--rank R: one rank)",
    "gang compare ID ID …": "the values in which runs differ, and their last metrics",
    "gang timeline ID -o FILE": "spans as Chrome trace JSON, to be opened in Perfetto",
    "gang doctor": "check this machine: versions, GPUs, space, a two-rank all_reduce",
}
"""Commands for gangs; those that set up libraries are of :func:`hydrogen_magic.plugins.commands`."""


def main(arguments: Sequence[str]) -> int:
    """Carry out a command; return the exit status."""
    setups = plugins.commands()
    if arguments and arguments[0] in setups:
        status: int = pkgutil.resolve_name(setups[arguments[0]])(arguments[1:])
        return status
    if set(arguments) & {"-h", "--help"}:
        print(_usage(setups), file=OutputStream())
        return 0
    if arguments[:1] != ["gang"]:
        print(_usage(setups), file=sys.stderr)
        if arguments:
            choices = not_one_of(arguments[0], ["gang", *setups])
            print(f"\nunknown command {arguments[0]!r}: {choices}", file=sys.stderr)
        return 2
    try:
        command = _parsed(arguments[1:])
    except ArgumentsError as error:
        _report(error)
        return 2
    try:
        status = _manage(command)
        OutputStream().flush()
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the program that reads it has ended, as head does
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return 1
    except (ArgumentsError, HydrogenError) as error:
        _report(error)
        return 1


def _report(error: Exception) -> None:
    """Print an error, which may name commands of a notebook, with those of a terminal."""
    text = re.sub(r"(?<!%)%gang\b", "python -m hydrogen_magic gang", str(error))
    print(text, file=sys.stderr)


def _usage(setups: Iterable[str]) -> str:
    others = {f"{name} …": f"set up {name} (--help: its commands)" for name in setups}
    commands = {**COMMANDS, **others}
    width = max(map(len, commands)) + 2
    lines = (f"  {command:<{width}}{meaning}" for command, meaning in commands.items())
    return "\n".join(["usage: python -m hydrogen_magic COMMAND", "", *lines])


def _parsed(words: Sequence[str]) -> GangCommand:
    command = parse_gang_words(words)
    if command.out:
        raise ArgumentsError(
            "--out assigns variables of a notebook, and a terminal has none: drop it"
        )
    if command.all:
        raise ArgumentsError(
            "--all stops the gangs of a notebook's kernel, and a terminal has none: name each gang to stop"
        )
    if command.verb == "attach" and command.take:
        raise ArgumentsError(
            "--take: a terminal that attaches only follows the gang; `%gang stop ID --take` stops it even if "
            "a kernel controls it"
        )
    return command


def _manage(command: GangCommand) -> int:
    if command.verb == "attach":
        return _follow(gang_command.reachable(command.gang, "watch"))
    if command.verb == "wait":
        # Without its result, whose classes this process may lack.
        gang_command.waited(command, "watch").raise_for_state()
        return 0
    if command.verb == "doctor":
        stdout = OutputStream()
        is_well = gang_command.examine(
            lambda lines: print(*lines, sep="\n", flush=True, file=stdout)
        )
        return 0 if is_well else 1
    gang_command.manage(command)
    return 0


def _follow(gang: Gang) -> int:
    # Its errors are raised: a reader that has ended, as head does, ends this process alone.
    view = pick_view(gang, stdout=OutputStream())
    try:
        attending.show(gang, view)
    except KeyboardInterrupt:
        view.close(gang.snapshot())
        print(f"detached from gang {gang.id}, which continues")
        return 0
    view.close(gang.snapshot())
    gang.raise_for_state()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
