"""Ended views that still answer pages, in a limited number to save the kernel's memory."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydrogen_magic.views.widget import WidgetView

_N_KEPT = 4
"""As many as gangs whose results the kernel keeps."""
_N_RELEASED = 32
"""Each has its picture and the view's program, some 200 kB."""

_kept: deque[WidgetView] = deque()
"""Views that still answer, newest last."""
_released: deque[WidgetView] = deque()
"""Older ones, whose pages only have the final picture."""
_moving = threading.Lock()
"""Detached gangs end in their own threads."""


def retain(view: WidgetView) -> None:
    """Keep an ended view, and release older ones."""
    with _moving:
        _kept.append(view)
        releasing = [_kept.popleft() for _ in range(len(_kept) - _N_KEPT)]
        _released.extend(releasing)
        ending = [_released.popleft() for _ in range(len(_released) - _N_RELEASED)]
    for old in releasing:
        old.release()
    for old in ending:
        old.close_widget()
