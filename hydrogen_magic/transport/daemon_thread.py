"""Blocking work of an event loop, in a thread that does not keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")


def in_daemon_thread(work: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Return a future of ``work()``, run in a daemon thread; a cancelled future ignores its end.

    The loop's own executor joins its threads when the process exits, so a call that hangs would keep
    the kernel alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(done.set_result, work())
        except StopIteration as raised:  # which a future refuses
            settle = partial(done.set_exception, RuntimeError(f"StopIteration: {raised}"))
        except BaseException as raised:
            settle = partial(done.set_exception, raised)
        with suppress(RuntimeError):  # the loop was closed meanwhile, with the kernel
            loop.call_soon_threadsafe(lambda: None if done.done() else settle())

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
