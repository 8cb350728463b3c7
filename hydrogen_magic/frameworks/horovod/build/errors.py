"""Errors of the build: a text for the terminal."""

from __future__ import annotations


class BuildError(RuntimeError):
    """Horovod could not be built, installed or loaded; the message contains all information."""

    exit_code = 1


class MissingError(BuildError):
    """This machine lacks a requirement; nothing was downloaded or changed."""

    exit_code = 3  # 2 is argparse's
