"""Variables of this process's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Take a variable away from libraries that would read it."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
