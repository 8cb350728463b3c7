"""``python -m hydrogen_magic horovod build``: see :mod:`hydrogen_magic.frameworks.horovod.build`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from hydrogen_magic.frameworks import subprocess_log
from hydrogen_magic.frameworks.horovod import build, installation
from hydrogen_magic.frameworks.horovod.build import installing
from hydrogen_magic.frameworks.horovod.build.errors import BuildError


def main(arguments: Sequence[str]) -> int:
    """Run a sub-command and return the exit code: 0 success, 1 failure, 3 missing requirements."""
    given = parser().parse_args(arguments)
    subprocess_log.exit_on_signals()
    try:
        return _build(given) if given.command == "build" else _check()
    except BuildError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (OSError, subprocess.SubprocessError) as error:
        print(f"Horovod cannot be built here: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Partial results are deleted.", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the sub-commands."""
    parser = argparse.ArgumentParser(
        prog="python -m hydrogen_magic horovod",
        description="Build Horovod for the torch that is installed, and install it.",
        epilog=(
            "Horovod's own variables select its features: HOROVOD_WITHOUT_MPI=1, "
            "HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_NCCL_HOME=…. MAKEFLAGS=-j4 sets the number of "
            "parallel compilers."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser(
        "build", help="build and install Horovod; a second build uses the cache"
    )
    building.add_argument(
        "--force", action="store_true", help="compile even if there is a cached wheel"
    )
    building.add_argument(
        "--no-install", action="store_true", help="build the wheel without installing it"
    )
    commands.add_parser("check", help="show the installed version and test it")
    return parser


def _build(given: argparse.Namespace) -> int:
    made = build.build(
        is_forced=given.force,
        is_installed=not given.no_install,
        say=lambda line: print(line, flush=True),
    )
    how = "compiled" if made.was_compiled else "from the cache"
    works = "" if given.no_install else " works,"
    print(
        f"Horovod with {', '.join(made.operations)}{works} {how}, in {made.took_s:.1f} s\n{made.wheel}"
    )
    return 0


def _check() -> int:
    installing.try_out()
    found, torch = installation.horovod(), installation.torch()
    assert found is not None and torch is not None  # otherwise there would have been a fault
    operations = ", ".join(found.operations or ["unknown operations"])
    print(f"Horovod {found.version} with {operations} works with torch {torch.version}")
    return 0
