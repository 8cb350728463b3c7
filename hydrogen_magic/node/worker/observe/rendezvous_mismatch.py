"""Clear errors for torch's process group in a gang that has another rendezvous.

torch asks for a variable that such a gang does not have.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from hydrogen_magic.node.worker import reporter as _reporter


def explained(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``init_process_group`` with an error that explains a missing ``MASTER_ADDR``."""

    @functools.wraps(init_process_group)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return init_process_group(*args, **kwargs)
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

    return call
