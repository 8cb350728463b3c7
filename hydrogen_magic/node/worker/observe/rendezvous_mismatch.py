"""Clear errors for torch's process group in a gang that has another rendezvous.

torch asks for a variable that such a gang does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hydrogen_magic.node.worker import reporter as _reporter


@contextmanager
def explained() -> Iterator[None]:
    """Explain an error of ``init_process_group`` about a missing ``MASTER_ADDR``."""
    try:
        yield
    except ValueError as error:
        reporter = _reporter.current()
        if reporter is None or "MASTER_ADDR" not in str(error) or "MASTER_ADDR" in os.environ:
            raise
        advice = reporter.exchanges.advice
        raise ValueError(
            "init_process_group() finds no torch rendezvous in a gang launched `--with "
            f"{advice.rendezvous}`: launch the gang `--with torch`, or "
            f"{advice.text or 'join the ranks with that library'}"
        ) from error
