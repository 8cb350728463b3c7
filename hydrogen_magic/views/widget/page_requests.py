"""Requests of pages for data; they are answered between two updates of the view."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator

from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views.widget.downloads import DownloadFile, DownloadMaker, parts
from hydrogen_magic.views.widget.live_updates import LiveUpdates
from hydrogen_magic.views.widget.page_commands import CommandHandler, PageCommand, PageSender
from hydrogen_magic.views.widget.page_updates import PageMessage, PageUpdates

_SERVING_S = 0.05
"""Time for requests of pages between two updates: half of it."""
_PARTS_AT_A_TIME = 4
"""Bytes of files between two updates: 40 MB/s, without blocking the view."""


class PageRequests:
    """The requests that wait, and the files on their way."""

    def __init__(
        self,
        live: LiveUpdates,
        commands: CommandHandler,
        send: PageSender,
        clock: Callable[[], float],
    ) -> None:
        self._lock = threading.RLock()
        """Held while requests are answered."""
        self._live = live
        self._commands = commands
        self._send = send
        self._clock = clock
        self._maker = DownloadMaker(self._on_file)
        self._waiting: deque[PageCommand] = deque()
        self._outgoing: deque[Iterator[PageMessage]] = deque()
        self._is_closed = False

    def add(self, request: PageCommand) -> None:
        """Answer ``request`` at the next :meth:`serve`; at once after :meth:`close`. From any thread."""
        self._waiting.append(request)
        self._serve_if_closed()

    def serve(self, *, is_limited: bool = True) -> None:
        """Answer requests and send parts of files, for a limited time."""
        with self._lock:
            until = self._clock() + _SERVING_S if is_limited else math.inf
            while self._waiting and self._clock() < until:
                self._answer_newest(self._waiting.popleft())
            n_left = _PARTS_AT_A_TIME if is_limited else math.inf
            while self._outgoing and n_left:
                part = next(self._outgoing[0], None)
                if part is None:
                    self._outgoing.popleft()
                    continue
                self._send(*part)
                n_left -= 1

    def close(self) -> None:
        """There are no more updates: answer everything now, and later requests at once."""
        with self._lock:
            self._is_closed = True
            self.serve(is_limited=False)

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        self._outgoing.clear()

    def _serve_if_closed(self) -> None:
        # close() sets the flag before it looks for requests for the last time.
        if self._is_closed:
            self.serve(is_limited=False)

    def _answer_newest(self, request: PageCommand) -> None:
        """Answer a request, unless the same page has replaced it by another since."""
        if request["do"] not in ("csv", "trace", "log"):
            subject = _subject(request)
            if any(_subject(later) == subject for later in list(self._waiting)):
                return
        self._answer(request)

    def _answer(self, request: PageCommand) -> None:
        updates = self._live.start()
        if request["do"] == "hello":
            for message in updates.full(request["client"]):
                self._send(*message)
            return
        try:
            self._answer_about(updates, request)
        except (KeyError, TypeError, OverflowError) as error:
            self._commands.refuse_unknown(request, error)
        except (HydrogenError, ValueError) as error:
            # for a metric that the next attempt has not logged yet
            self._commands.answer(request, ok=False, text=str(error))

    def _answer_about(self, updates: PageUpdates, request: PageCommand) -> None:
        match request["do"]:
            case "detail":
                self._send(*updates.detail(request))
            case "rows":
                updates.watch(request["ranks"])
                self._send_changes_if_closed()
            case "tracks":
                updates.watch_tracks(request["client"], request["ranks"])
                self._send_changes_if_closed()
            case _:
                self._maker.make(self._live.gang, request)

    def _send_changes_if_closed(self) -> None:
        if self._is_closed:
            for message in self._live.messages():
                self._send(*message)

    def _on_file(self, request: PageCommand, made: DownloadFile | str) -> None:
        """Receive a file, or an error message in its place; in the maker's thread."""
        if isinstance(made, str):
            self._commands.answer(request, ok=False, text=made)
            return
        self._commands.answer(request, ok=True)
        self._outgoing.append(parts(made, request))
        self._serve_if_closed()


def _subject(request: PageCommand) -> tuple[str, str, str | None]:
    return request["client"], request["do"], request.get("metric")
