"""``%%distributed`` on a cell, ``%distributed`` on a script."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydrogen_magic import plugins
from hydrogen_magic.core.argument_types import (
    choice,
    python_file,
    swept_values,
    typed,
    variable_names,
    whole_number,
)
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.notebook.arguments.parsing import (
    ArgumentsError,
    LineParser,
    add_cluster,
    add_display,
    add_limits,
    add_session,
    add_where,
    given_by,
    spec_of,
    split,
    unknown_message,
)


@dataclass(frozen=True)
class Arguments:
    """A line of ``%%distributed`` or ``%distributed``."""

    spec: JobSpec
    dry_run: bool = False
    """Print what would be captured and where each rank would run, without running it."""
    save: str | None = None
    """File to which the cell is written as a script for torchrun."""
    sweep: tuple[tuple[str, str], ...] = ()
    """Names of the notebook that are replaced, and their values as written."""
    sweep_jobs: int | None = None
    """Most runs of a sweep at once; None: as many as fit."""
    script: str | None = None
    """Script file or module name of the line form; None for a cell."""
    script_args: tuple[str, ...] = ()
    as_module: bool = False
    """True: ``script`` is a module name (``-m``)."""
    help: bool = False
    """True: only show :func:`usage`."""
    given: frozenset[str] = frozenset()
    """The fields of ``spec`` that the line itself sets."""


_NEXT_OPTION = r"\s--[A-Za-z]|(?<![,=\s])\s+-[A-Za-z]"
"""An option after values of a sweep. After a comma, ``-inf`` and ``-x`` are values."""
_SWEPT = re.compile(
    rf"""((?<!\S)--sweep[\s=](?:"(?:\\.|[^"\\])*"|'[^']*'|(?!{_NEXT_OPTION}|\s#)[^"'])*)"""
)
"""An option ``--sweep`` with its values: up to the next option or a comment outside of quotation marks."""

_OF_CELLS = {"out", "save", "sweep", "sweep_jobs"}
"""Options that :func:`_with_script` refuses: the help of scripts hides them."""


def parse(line: str, *, defaults: JobSpec | None = None, is_cell: bool = True) -> Arguments:
    """Return the parsed ``line``, or raise :class:`ArgumentsError`.

    ``defaults`` is used for options that the line does not set. With ``is_cell`` false, the line must name
    a script, or a module after ``-m``; all later words belong to the script.
    """
    tokens = split(line)
    tokens = _with_sweeps_joined(tokens) if is_cell else _with_timeline_joined(tokens)
    parser = distributed_parser(is_cell)
    found, unknown = parser.parse_known_args(tokens)
    if found.help:
        return Arguments(defaults or JobSpec(), help=True)
    if unknown:
        cells = distributed_parser(is_cell=True)
        raise ArgumentsError(unknown_message(unknown[0], tokens, parser, cells))
    spec = spec_of(found, defaults or JobSpec())
    out = tuple(dict.fromkeys(found.out)) or spec.out
    pdb = spec.pdb and not found.sweep  # of %pdb on: runs of a sweep have no input line
    spec = replace(spec, out=out, pdb=pdb)
    arguments = Arguments(
        spec=spec,
        dry_run=found.dry_run,
        save=found.save,
        sweep=tuple(found.sweep),
        sweep_jobs=found.sweep_jobs,
        given=given_by(found),
    )
    if not is_cell:
        return _with_script(arguments, found)
    _check_sweep(arguments)
    return arguments


def around_sweeps(line: str) -> list[str]:
    """Split the line of a cell before and after each ``--sweep`` with its values.

    The pieces with odd numbers are these options.
    """
    return _SWEPT.split(line)


def usage(is_cell: bool = True) -> str:
    """Return the help text. For scripts that of cells follows, since IPython does not call a cell magic
    without a body.
    """
    cells = distributed_parser(is_cell=True).format_help()
    return cells if is_cell else f"{distributed_parser(is_cell=False).format_help()}\n{cells}"


def distributed_parser(is_cell: bool) -> LineParser:
    """Return the parser of ``%%distributed``, or of ``%distributed``."""
    return _parser_on(is_cell, tuple(sys.path))


@functools.lru_cache(maxsize=2)
def _parser_on(is_cell: bool, path: tuple[str, ...]) -> LineParser:
    """``path``: the module path, on which plug-ins are looked for. Building a parser takes milliseconds."""
    parser = LineParser(
        prog="%%distributed" if is_cell else "%distributed",
        usage=None if is_cell else "%(prog)s [options] script.py [args] | -m module [args]",
        description="Run this cell on every rank of a new gang."
        if is_cell
        else "Run a script or module on every rank of a new gang; torchrun's work unchanged.",
        add_help=False,
        allow_abbrev=False,
    )
    add_where(parser)
    add_cluster(parser)
    parser.add_argument(
        "--with",
        dest="rendezvous",
        type=choice(plugins.RENDEZVOUS),
        metavar="|".join(plugins.RENDEZVOUS),
        help="how ranks find each other",
    )
    if is_cell:
        add_session(parser)
    add_limits(parser)
    parser.add_argument(
        "--out",
        action="extend",
        type=typed(variable_names),
        default=[],
        metavar="NAME[,NAME]",
        help="rank 0's variables to bring back",
    )
    parser.add_argument(
        "--save", type=typed(python_file), metavar="FILE.py", help="also write the cell as a script"
    )
    _add_comparison(parser)
    parser.add_argument(
        "--outlive",
        action="store_true",
        default=None,
        help="keep the gang running when the kernel ends; implies --detach",
    )
    add_display(parser)
    if not is_cell:
        _add_script(parser)
    return parser


def _add_comparison(parser: LineParser) -> None:
    """Add options for several runs of a cell, which are compared."""
    parser.add_argument(
        "--sweep",
        action="append",
        type=typed(swept_values),
        default=[],
        metavar="NAME=V,V",
        help="run the cell once for each value of a name; repeatable: all combinations",
    )
    parser.add_argument(
        "--sweep-jobs",
        type=whole_number(1),
        metavar="N",
        help="run at most N combinations at once",
    )
    parser.add_argument(
        "--track",
        type=choice(plugins.TRACKERS),
        metavar="|".join(plugins.TRACKERS),
        help="send parameters and metrics to a tracking server",
    )


def _add_script(parser: LineParser) -> None:
    """Add the script, and hide the options of cells."""
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, help="module to run, and its arguments")
    parser.add_argument("command", nargs=rest, help="script to run, and its arguments")
    for action in parser._actions:
        if action.dest in _OF_CELLS:
            action.help = argparse.SUPPRESS


def _check_sweep(arguments: Arguments) -> None:
    """Raise ArgumentsError for options that have no meaning for several runs of a cell, or for one."""
    if not arguments.sweep:
        if arguments.sweep_jobs is not None:
            raise ArgumentsError(
                "--sweep-jobs limits the runs of a sweep: add --sweep NAME=V,V, or drop it"
            )
        return
    names = [name for name, _ in arguments.sweep]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentsError(
            f"--sweep {twice} is given twice: write all values in one, as in --sweep {twice}=1,2"
        )
    reasons = {
        "--session": ("every run needs ranks of its own", arguments.spec.session),
        "--outlive": ("a sweep starts its runs from this cell", arguments.spec.outlive),
        "--detach": ("a sweep starts its runs from this cell", arguments.spec.detach),
        "--pdb": ("its runs have no input line", "pdb" in arguments.given),
        "--ranks": ("its runs have no input line", arguments.spec.on_ranks),
        "--save": ("a script has one value of each name", arguments.save),
        "--timeline FILE": ("every run would write the same file", arguments.spec.timeline),
    }
    for option, (reason, is_given) in reasons.items():
        if is_given:
            raise ArgumentsError(f"--sweep cannot be combined with {option}: {reason}")


def _with_script(arguments: Arguments, found: argparse.Namespace) -> Arguments:
    if arguments.sweep or arguments.sweep_jobs is not None:
        raise ArgumentsError(
            "--sweep replaces values that a cell uses, and a script uses none of the notebook: call "
            "%distributed in a loop"
        )
    as_module = found.module is not None
    words: Sequence[str] = found.module if as_module else found.command
    if words and words[0] == "--":  # some versions of argparse keep the separator
        words = words[1:]
    if not words:
        example = "-m package.module" if as_module else "train.py --epochs 3"
        raise ArgumentsError(
            f"%distributed needs a script or -m module to run, as in: %distributed --np 2 {example}"
            "; for a cell write %%distributed"
        )
    if arguments.spec.out:
        raise ArgumentsError(
            "--out brings back variables of a cell, and a script has none: drop --out"
        )
    if arguments.save is not None:
        raise ArgumentsError(
            "--save writes a cell as a script, and this already is a script: drop --save"
        )
    return replace(arguments, script=words[0], script_args=tuple(words[1:]), as_module=as_module)


def _with_sweeps_joined(tokens: list[str]) -> list[str]:
    """Attach the words that belong to each ``--sweep``: its values may have spaces between them."""
    joined: list[str] = []
    for word in tokens:
        if word == "--sweep":
            joined.append("--sweep=")
        elif joined and joined[-1].startswith("--sweep=") and not _is_option(word, joined[-1]):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _is_option(word: str, values: str) -> bool:
    """Whether ``word`` is not one of the ``values`` before it."""
    return re.compile(_NEXT_OPTION).match(f"{values} {word}", len(values)) is not None


def _with_timeline_joined(tokens: list[str]) -> list[str]:
    """Attach the word that belongs to ``--timeline``: before a script, only a JSON file does."""
    if "--timeline" not in tokens:
        return tokens
    at = tokens.index("--timeline")
    before, _ = distributed_parser(is_cell=False).parse_known_args(tokens[:at])
    if before.command or before.module is not None:
        return tokens  # it is an option of the script
    has_file = tokens[at + 1 : at + 2] and tokens[at + 1].endswith((".json", ".json.gz"))
    file = tokens[at + 1] if has_file else ""
    return [*tokens[:at], f"--timeline={file}", *tokens[at + (2 if has_file else 1) :]]
