"""What the build gives up with: a text for the person at the terminal, and nothing else."""

from __future__ import annotations

__all__ = ["BuildError", "MissingError"]


class BuildError(RuntimeError):
    """Horovod could not be built, installed or loaded; the message is all there is to show."""

    exit_code = 1


class MissingError(BuildError):
    """Something is missing on this machine; nothing was downloaded or changed."""

    exit_code = 3  # 2 is argparse's
