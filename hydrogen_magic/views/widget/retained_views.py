"""Ended views that still answer pages, in a limited number to save the kernel's memory."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydrogen_magic.views.widget import WidgetView

_N_KEPT = 4
"""As many as gangs whose results the kernel keeps."""

_kept: deque[WidgetView] = deque()
"""Views that still answer, newest last."""
_moving = threading.Lock()
"""Detached gangs end in their own threads."""


def retain(view: WidgetView) -> None:
    """Keep an ended view, and close the widgets of older ones, whose pages have the final picture."""
    with _moving:
        _kept.append(view)
        closing = [_kept.popleft() for _ in range(len(_kept) - _N_KEPT)]
    for old in closing:
        old.close_widget()
