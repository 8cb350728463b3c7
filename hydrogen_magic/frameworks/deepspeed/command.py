"""``python -m hydrogen_magic deepspeed build``: compiles operators, which ranks then only load.

A process of its own compiles (:mod:`.operators`), by the call that ranks make when they first use one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from hydrogen_magic.core.library_types import is_installed
from hydrogen_magic.frameworks import subprocess_log
from hydrogen_magic.frameworks.deepspeed import operators

_COMMUNICATION = "deepspeed_shm_comm"


def main(arguments: Sequence[str]) -> int:
    """Run a sub-command and return the exit code: 0 success, 1 failure, 3 DeepSpeed is not installed."""
    given = parser().parse_args(arguments)
    if not is_installed("deepspeed"):
        print(
            "DeepSpeed is not installed here: run `pip install deepspeed ninja`.", file=sys.stderr
        )
        return 3
    subprocess_log.exit_on_signals()
    try:
        return _build(given.operator or [_COMMUNICATION])
    except (OSError, subprocess.SubprocessError) as error:
        print(f"DeepSpeed's operators cannot be compiled here: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the sub-commands."""
    parser = argparse.ArgumentParser(
        prog="python -m hydrogen_magic deepspeed",
        description="Compile operators of DeepSpeed for the torch that is installed.",
        epilog="TORCH_EXTENSIONS_DIR sets where torch keeps them; ranks need the same value.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser(
        "build", help="compile operators; those that are up to date are only tested"
    )
    building.add_argument(
        "operator",
        metavar="OPERATOR",
        nargs="*",
        help=f"such as cpu_adam; by default {_COMMUNICATION}, which DeepSpeed uses on CPUs",
    )
    return parser


def _build(names: Sequence[str]) -> int:
    listed = ", ".join(names)
    print(f"· compiling {listed}: this may take minutes", flush=True)
    started = time.monotonic()
    progress = subprocess_log.CompilerProgress(sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hydrogen-magic-deepspeed-") as folder:
        log = Path(folder) / "log"

        def feed(line: str) -> None:
            if line.startswith(operators.MARK):
                print(line, end="", flush=True)
            progress.feed(line)

        with closing(progress):
            code = subprocess_log.run(
                [sys.executable, "-u", "-m", operators.__name__, *names],
                cwd=Path.cwd(),
                environment={**os.environ, "NINJA_STATUS": "[%f/%t] "},
                log=log,
                on_line=feed,
            )
        if code != 0:
            lines = subprocess_log.relevant(log.read_text(errors="replace"))
            print("\n  ".join([f"{listed} cannot be loaded:", *lines]), file=sys.stderr)
            return 1
    print(f"{listed} can be loaded, after {time.monotonic() - started:.1f} s")
    return 0
