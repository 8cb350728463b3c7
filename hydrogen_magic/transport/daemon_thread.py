"""Blocking work of an event loop, in a thread that does not keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

_T = TypeVar("_T")


def in_daemon_thread(work: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Return a future of ``work()``, run in a daemon thread; a cancelled future ignores its end.

    The loop's own executor joins its threads when the process exits, so a call that hangs would keep
    the kernel alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(value: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(cast(_T, value))
        else:
            done.set_exception(error)

    def run() -> None:
        value: _T | None = None
        error: BaseException | None = None
        try:
            value = work()
        except StopIteration as raised:  # which a future refuses
            error = RuntimeError(f"StopIteration: {raised}")
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile, with the kernel
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
