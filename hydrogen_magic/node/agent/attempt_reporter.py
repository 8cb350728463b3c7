"""Reports of one attempt to the kernel, by the agent itself and by its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.masking import Mask


@dataclass(frozen=True)
class AttemptReporter:
    """Sends events and files of one attempt."""

    clock_zero_s: float
    """The ``time.monotonic()`` at which the gang's clock was 0."""
    mask: Mask
    """Removes secrets from what ranks report."""
    emit: Callable[[ev.Event], None]
    """Sends an event."""
    send_file: Callable[[int, msg.FileContent, int], None]
    """Sends a file of a rank and closes its descriptor."""

    def now_s(self) -> float:
        """Return the time on the gang's clock."""
        return time.monotonic() - self.clock_zero_s

    def notice(self, level: str, text: str) -> None:
        """Show a message to the user (``level``: info, warning or error)."""
        self.emit(ev.Notice(self.now_s(), level, text))
