"""Parses the lines of magics into frozen values, independently of IPython and of their use."""

from hydrogen_magic.notebook.arguments.distributed import (
    Arguments,
    around_sweeps,
    parse,
    usage,
)
from hydrogen_magic.notebook.arguments.gang import (
    GANG_COMMANDS,
    GangCommand,
    parse_gang,
    parse_gang_words,
)
from hydrogen_magic.notebook.arguments.infer import (
    InferArguments,
    infer_usage,
    parse_infer,
)
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError

__all__ = [
    "GANG_COMMANDS",
    "Arguments",
    "ArgumentsError",
    "GangCommand",
    "InferArguments",
    "around_sweeps",
    "infer_usage",
    "parse",
    "parse_gang",
    "parse_gang_words",
    "parse_infer",
    "usage",
]
