"""``%%infer``: the frame, its batches, and the columns of the result."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hydrogen_magic import plugins
from hydrogen_magic.core import syntax
from hydrogen_magic.core.argument_types import choice, variable_names, whole_number
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.options import ON_ERROR, InferOptions
from hydrogen_magic.notebook.arguments.distributed import distributed_parser
from hydrogen_magic.notebook.arguments.parsing import (
    ArgumentsError,
    LineParser,
    add_cluster,
    add_display,
    add_limits,
    add_session,
    add_where,
    given_by,
    list_with_spaces,
    spec_of,
    split,
    unknown_message,
)

_PATH_SIGNS = "/."
"""Characters that are not in a name of a variable, but in nearly every path of Parquet data."""


@dataclass(frozen=True)
class InferArguments:
    """A line of ``%%infer``."""

    frame: str
    """Name of the notebook's DataFrame, an expression, or a path of data."""
    spec: JobSpec
    options: InferOptions
    out: str | None = None
    """Name of the result in the notebook; None: it is the cell's value."""
    target: str | None = None
    """Output path of the predictions for Parquet data; None: beside the data."""
    resume: bool = False
    """Continue the last run of this cell over this frame."""
    dry_run: bool = False
    help: bool = False
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields of ``spec`` that the line itself sets."""


def parse_infer(line: str, *, defaults: JobSpec) -> InferArguments:
    """Return the parsed ``line``, or raise :class:`ArgumentsError`."""
    parser = infer_parser()
    expression, rest = _leading_expression(line)
    words = [*expression, *split(rest)]
    found, unknown = parser.parse_known_args(words)
    if found.help:
        return InferArguments("", defaults, InferOptions(), help=True)
    if unknown:
        cells = distributed_parser(is_cell=True)
        raise ArgumentsError(unknown_message(unknown[0], words, parser, cells))
    frame = _one_frame(found.frame, words)
    spec = replace(spec_of(found, defaults), rendezvous="torch", out=())
    _refuse_inline(spec)
    out, target = _name_or_path(found.out)
    if found.resume and spec.session is not None:
        raise ArgumentsError(
            "--resume cannot tell whether the ranks of a session hold what they held: drop one of the two"
        )
    return InferArguments(
        frame,
        spec,
        _options(found),
        out,
        target,
        found.resume,
        found.dry_run,
        given=given_by(found),
    )


def infer_usage() -> str:
    """Return the help text for ``--help``."""
    return infer_parser().format_help()


def infer_parser() -> LineParser:
    """Return the parser of ``%%infer``."""
    parser = LineParser(
        prog="%%infer",
        usage="%(prog)s DF [options]",
        description="Run this cell once on every rank, then the `predict` it defines on every batch "
        "of DF: a DataFrame (pandas, Polars, PyArrow, Spark, or another object with Arrow data), an "
        "expression like df[df.x > 0], or a path of Parquet, CSV or JSON Lines data.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("frame", nargs="*", metavar="DF", help="the frame")
    add = parser.add_argument
    add("--out", metavar="NAME|PATH", help="name of the result, or its path for data in files")
    add("--batch-size", type=whole_number(), metavar="N", help="maximum rows per call of predict")
    add("--columns", type=_names, metavar="A[,B]", help="input columns to return")
    add("--replace", type=_names, metavar="A[,B]", help="input columns that predict may change")
    add("--only", action="store_true", help="return only the predicted columns")
    add("--schema", metavar="'NAME TYPE, …'", help="predicted columns: 'score double'")
    add(
        "--on-error",
        type=choice(ON_ERROR),
        metavar="|".join(ON_ERROR),
        help="rows that fail: raise, leave null, or leave null with a reason",
    )
    add("--resume", action="store_true", help="continue with the rows that an earlier run finished")
    add_where(parser)
    add_cluster(parser)
    add_session(parser, has_ranks=False)
    add_limits(parser)
    add_display(parser)
    return parser


def _names(text: str) -> tuple[str, ...]:
    """Return names of columns, which need not be Python names: any text between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _leading_expression(line: str) -> tuple[list[str], str]:
    """Return an expression with brackets at the beginning of the line as one word, and the rest."""
    line = line.strip()
    if not re.match(r"[^\W\d][\w.]*[\[(]", line):
        return [], line
    ends = (match.start() for match in re.finditer(r"\s+(?=-)|\s*$", line))
    for end in ends:
        try:
            syntax.parse(line[:end], mode="eval")
        except (SyntaxError, ValueError):
            continue
        return [line[:end]], line[end:]
    return [], line


def _one_frame(frames: Sequence[str], words: Sequence[str]) -> str:
    if len(frames) == 1:
        return frames[0]
    example = "as in: %%infer df --np 4 --out scored"
    if not frames:
        raise ArgumentsError(f"%%infer needs the name of a DataFrame, {example}")
    listed = list_with_spaces(frames[1], words)
    remedy = f"write a list without spaces: {listed}" if listed else example
    raise ArgumentsError(f"%%infer takes one DataFrame, got {' '.join(frames)}; {remedy}")


def _name_or_path(text: str | None) -> tuple[str | None, str | None]:
    """Return the name of the result and the path of the result: one of them, or neither."""
    if text is None:
        return None, None
    if any(sign in text for sign in _PATH_SIGNS):
        return None, text
    try:
        names = variable_names(text)
    except ValueError:
        raise ArgumentsError(
            "--out should be a name for the result, like scored, or a path for data in files, "
            f"like ./scored.parquet; got {text!r}"
        ) from None
    if len(names) != 1:
        raise ArgumentsError(f"--out should be one name for the result, got {','.join(names)}")
    return names[0], None


def _refuse_inline(spec: JobSpec) -> None:
    if isinstance(plugins.placement(spec.placement), plugins.InKernelPlacement):
        raise ArgumentsError(
            f"%%infer does not support --on {spec.placement}: to debug predict, call it in the "
            "notebook on a few rows, as in predict(df.head())"
        )


def _options(found: argparse.Namespace) -> InferOptions:
    given = {
        "batch_size": found.batch_size,
        "columns": found.columns,
        "schema": found.schema,
        "on_error": found.on_error,
        "replace": found.replace,
    }
    try:
        chosen = {name: value for name, value in given.items() if value is not None}
        return InferOptions(only=found.only, **chosen)
    except InferError as error:
        raise ArgumentsError(str(error)) from None
