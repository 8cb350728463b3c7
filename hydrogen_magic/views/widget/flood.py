"""Whether the kernel sends so many messages that pages may miss some of them.

Jupyter's server drops messages of a kernel that sends more than 1,000 a second
(``iopub_msg_rate_limit``), and the kernel's own socket drops messages that a busy server has not read.
Neither reports a loss to the kernel.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from hydrogen_magic.views import kernel_here

_WINDOW_S = 1.0
_MANY_PER_S = 250.0
"""Far more than a view and a cell's own output send; servers are rarely set to drop fewer."""
_MOST_WAITING = 1000
"""The kernel's socket drops messages when this many wait in it: ZeroMQ's default."""
_RECENT_S = 30.0
"""A busy server has read a flood's last messages by then."""
_LOOK_S = 0.25
"""Between two looks whether a flood is over."""
_RESEND_S = (0.0, 1.0, 2.0, 3.5, 7.0)
"""When to send again after a flood: the kernel's socket drops messages until the server has read some."""
_RESEND_LATE_S = (3.5, 7.0)
"""The same for a page that has the view: it has said hello by then if it exists."""


def messages_sent() -> int:
    """Return how many messages this kernel has sent so far; 0 if it is not counted."""
    session = getattr(kernel_here(), "session", None)
    return getattr(session, "message_count", 0)


class FloodWatch:
    """Detects floods from the number of messages, which ``count`` returns. ``clock`` is in seconds.

    Without a view, nothing watches. If a new watch finds that many messages were sent since the last one
    looked, they may be a flood that has just ended, and that still fills the kernel's socket.
    """

    n_seen = 0
    """Number of messages when any watch last looked."""

    def __init__(
        self,
        count: Callable[[], int] = messages_sent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._clock = clock
        self._mark = clock(), count()
        """Beginning of the present window."""
        self._last_s = -math.inf
        """When the last flood was seen."""
        self._resend_at: list[float] = []
        self.is_on = False
        now, n_sent = self._mark
        if n_sent - FloodWatch.n_seen > _MOST_WAITING:
            self._last_s = now
            self.send_again(_RESEND_LATE_S)

    def poll(self) -> bool:
        """Take a look, several times a second; return True when it is time to send again."""
        now, count = self._clock(), self._count()
        FloodWatch.n_seen = count
        since, before = self._mark
        was_on = self.is_on
        if count - before > _MANY_PER_S * max(_WINDOW_S, now - since):
            self.is_on, self._last_s = True, now
        elif now - since >= _WINDOW_S:
            self.is_on = False
        if now - since >= _WINDOW_S:
            self._mark = now, count
        if was_on and not self.is_on:
            self.send_again()
        is_due = not self.is_on and bool(self._resend_at) and now >= self._resend_at[0]
        if is_due:
            del self._resend_at[0]
        return is_due

    def send_again(self, after_s: Sequence[float] = _RESEND_S) -> None:
        """Make :meth:`poll` return True several times from now on, as it does after a flood."""
        self._resend_at = [self._clock() + each_s for each_s in after_s]

    @property
    def is_over(self) -> bool:
        """True when everything has been sent again."""
        return not (self.is_on or self._resend_at)

    @property
    def is_recent(self) -> bool:
        """True during a flood, and as long afterwards as its messages may be on their way."""
        return self._clock() - self._last_s < _RECENT_S


def resend_after(flood: FloodWatch, resend: Callable[[], bool]) -> None:
    """After a recent flood, call ``resend`` several times in a thread, until it returns False."""

    def wait_and_resend() -> None:
        while not flood.is_over:
            time.sleep(_LOOK_S)
            if flood.poll() and not resend():
                return

    flood.poll()
    if flood.is_recent:
        flood.send_again()
        threading.Thread(target=wait_and_resend, daemon=True).start()
