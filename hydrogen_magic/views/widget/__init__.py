"""The notebook view: a live widget if a page can draw it, otherwise text, and a static picture at the end.

A gang is shown in up to three ways, one after another:

- a front end is expected (``display.is_widget_expected``): a widget is displayed, and after its page has
  said hello, the page gets everything, then at most ten messages a second;
- no page has said hello after three seconds, or no front end is expected: the ranks' output is
  printed and a block of text updated in place, from the first event on;
- at the end: a picture of static HTML, which a saved notebook and nbconvert show.

A flood of other messages makes the server drop messages, ours among them. A page that has the widget
requests missing data. After the flood, a widget that has reached no page is opened again, and the end of
its cell is reported again (:meth:`WidgetView._send_again`). Two limits remain. Messages that a slow server
has queued are shown after those before them, however late. An output that was dropped is displayed again
only in JupyterLab and Notebook 7: other front ends do not let a page see whether the notebook has it, and
an output that is displayed twice stays in the notebook twice.

Commands of pages arrive in other threads while a cell waits, see
:mod:`~hydrogen_magic.views.widget.shell_interceptor`. :meth:`WidgetView.update` answers their requests;
after the end, the thread of the command does.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydrogen_magic.core.events import Event
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import without_colour
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views import DETACHED_S, Actions
from hydrogen_magic.views.elapsed import GangClock
from hydrogen_magic.views.outputs import NotebookOutput
from hydrogen_magic.views.text_table import block
from hydrogen_magic.views.text_view import TextView
from hydrogen_magic.views.widget.display import Display, is_view_needed, is_widget_expected
from hydrogen_magic.views.widget.downloads import DownloadFile, DownloadMaker, parts
from hydrogen_magic.views.widget.feed import Message, PageFeed
from hydrogen_magic.views.widget.flood import FloodWatch
from hydrogen_magic.views.widget.page_commands import CommandHandler, Order
from hydrogen_magic.views.widget.retained_views import keep
from hydrogen_magic.views.widget.static_html import gathered, still

if TYPE_CHECKING:
    from hydrogen_magic.views.widget.model import Page

__all__ = ["WidgetView", "still"]

_PATIENCE_S = 3.0
"""A page with a widget manager says hello within a second, even for a large notebook."""
_MESSAGE_S = 0.1
"""Ten messages a second appear continuous, and leave the server time."""
_SERVING_S = 0.05
"""Time for requests of pages between two updates: half of it."""
_PARTS_AT_A_TIME = 4
"""Bytes of files between two updates: 40 MB/s, without blocking the view."""
_CALM_EVERY_S = 0.25
"""Between two looks whether a flood is over."""
_AGAIN_AFTER_S = (0.0, 1.0, 2.0)
"""After a flood, when the server may still drop messages, or have many to read before ours."""
_WIDTH = NotebookOutput.width


class WidgetView:
    """Shows a gang in a notebook; see the module. ``blocking``: a cell waits for the gang."""

    def __init__(
        self,
        actions: Actions,
        *,
        blocking: bool,
        expected: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actions: Actions | None = actions
        self._blocking = blocking
        self._expected = is_widget_expected() if expected is None else expected
        self._clock = clock
        self._gang_clock = GangClock(clock)
        self._display = Display()
        self._flood = FloodWatch(clock=clock)
        self._commands = CommandHandler(actions, self._send, self._later)
        self._maker = DownloadMaker(self._on_file)
        self._state = GangState()
        self._n_seen = 0
        """Number of events so far, among those of ``actions``."""
        self._feed: PageFeed | None = None
        """Source of messages to pages; created for the first page, so that it costs nothing without one."""
        self._fresh: list[Event] = []
        """Events that it has not processed yet."""
        self._page: Page | None = None
        self._picture: tuple[str, str] | None = None
        """The display after the end, as HTML and as text."""
        self._text: TextView | None = None
        self._opened_at: float | None = None
        self._next_message_at = 0.0
        self._is_heard = threading.Event()
        """A page has said hello."""
        self._asked: deque[Order] = deque()
        self._outgoing: deque[Iterator[Message]] = deque()
        self._serving = threading.RLock()
        self._is_closed = False
        self._is_broken = False
        """Pages get no more messages, see :meth:`_give_up`."""
        self._is_text_over = False

    @property
    def interval_s(self) -> float:
        """Seconds between two updates: 0.1, and less if they also read messages of pages."""
        if self._text is not None and not self._blocking:
            return DETACHED_S
        return self._page.interval_s if self._page is not None else _MESSAGE_S

    def update(self, state: GangState, fresh: Sequence[Event]) -> None:
        """Update pages, or the text; answer requests of pages."""
        self._state = state
        self._n_seen += len(fresh)
        try:
            self._tell_pages(state, fresh)
            if self._flood.look():
                self._send_again()
        except Exception as error:  # a fault of ours: the gang and its output matter more
            self._give_up(error)
        if not self._is_heard.is_set():
            self._show_text(state, fresh)

    def close(self, state: GangState) -> None:
        """Show the end; leave a picture in the page and in the saved notebook."""
        self._state = state
        try:
            self._tell_end(state)
            self._leave_picture(state)
            with self._serving:
                self._is_closed = True
                self._serve(all_of_it=True)
        except Exception as error:  # as in update()
            self._give_up(error)
            self._end_as_text(state)
        self._text = None
        if self._page is not None:
            keep(self)
            self._flood.look()
            if self._flood.is_recent:
                threading.Thread(target=self._send_again_when_calm, daemon=True).start()

    def _send_again_when_calm(self) -> None:
        while self._flood.is_on and self._page is not None:
            time.sleep(_CALM_EVERY_S)
            self._flood.look()
        for wait_s in _AGAIN_AFTER_S:
            time.sleep(wait_s)
            self._send_again()

    def _send_again(self) -> None:
        """Send again what a page cannot ask for because it does not know of it."""
        page = self._page
        if page is None:
            return
        if not self._is_heard.is_set() and not is_view_needed():
            page.open_again()
        page.free_prompt()

    def _tell_pages(self, state: GangState, fresh: Sequence[Event]) -> None:
        if self._opened_at is None:
            self._open(state)
        if self._page is not None:
            self._page.pump()
        self._take(fresh)
        if self._is_heard.is_set() and self._text is not None:
            self._return_to_page(state)
        if self._clock() >= self._next_message_at:
            self._next_message_at = self._clock() + _MESSAGE_S
            self._show_page(state)
            self._serve()

    def _tell_end(self, state: GangState) -> None:
        if self._opened_at is None:
            self._open(state)
        if self._page is not None:
            self._page.unblock()
        self._take([])
        self._show_page(state)
        self._end_text(state)

    def _end_as_text(self, state: GangState) -> None:
        """Print the output that a page has shown until now."""
        if not self._is_text_over:
            self._show_text(state, [])
            self._end_text(state)

    def _end_text(self, state: GangState) -> None:
        if self._text is not None:
            self._text.close(state)
            self._is_text_over = True

    def _give_up(self, error: Exception) -> None:
        """Continue with text only: messages to pages can no longer be created."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        # Not a warning: notebooks often ignore or raise them.
        print(
            f"the live view of gang {self._state.gang} failed and was replaced by text; please "
            f"report {type(error).__name__}: {error} ({place.filename}, line {place.lineno})",
            file=sys.stderr,
        )
        self._is_broken = True
        self._is_heard.clear()
        self._feed, self._fresh = None, []
        self._asked.clear()
        self._outgoing.clear()
        page, self._page = self._page, None
        if page is not None:
            with suppress(Exception):  # the same error may occur there too
                page.close()

    def _take(self, fresh: Sequence[Event]) -> None:
        if self._feed is not None:
            self._fresh += fresh
        elif self._is_heard.is_set():
            self._begin()

    def _events(self) -> list[Event]:
        """Return all events so far; the oldest output may be missing, as in :class:`Gang`."""
        return [] if self._actions is None else self._actions.events()[: self._n_seen]

    # ── pages ──

    def _open(self, state: GangState) -> None:
        self._opened_at = self._clock()
        if self._expected:
            from hydrogen_magic.views.widget.model import Page  # takes 0.2 s

            self._page = Page(self._display, self._commands.take)
            self._page.open(state.gang, blocking=self._blocking)
            self._page.show("\n".join(block(state, state.now_s, _WIDTH)))
        else:
            self._start_text()

    def _begin(self) -> PageFeed:
        """Start following the gang for pages; the first one gets everything at once."""
        feed = PageFeed(is_raised=self._blocking)
        state, fresh = self._state, self._events()
        while feed.update(state, fresh, self._gang_clock.now_s(state)) and state.is_terminal:
            fresh = []
        self._feed = feed
        return feed

    def _show_page(self, state: GangState) -> None:
        if self._feed is None:
            return
        now_s = self._gang_clock.now_s(state)
        fresh, self._fresh = self._fresh, []
        while (message := self._feed.update(state, fresh, now_s)) is not None:
            self._send(*message)
            if not state.is_terminal:
                return
            fresh = []  # at the end, the remaining data takes several messages

    def _send(self, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        page = self._page
        if page is not None:
            page.send(content, buffers)

    def _later(self, order: Order) -> None:
        if self._is_broken:
            return
        if order["do"] == "hello":
            self._is_heard.set()
        self._asked.append(order)
        # After close() there are no more updates; it sets the flag before its last check.
        if self._is_closed:
            self._serve(all_of_it=True)

    # ── requests of pages ──

    def _serve(self, *, all_of_it: bool = False) -> None:
        with self._serving:
            until = math.inf if all_of_it else self._clock() + _SERVING_S
            while self._asked and self._clock() < until:
                self._answer_newest(self._asked.popleft())
            n_left = _PARTS_AT_A_TIME
            while self._outgoing and (n_left or all_of_it):
                part = next(self._outgoing[0], None)
                if part is None:
                    self._outgoing.popleft()
                    continue
                self._send(*part)
                n_left -= 1

    def _answer_newest(self, order: Order) -> None:
        """Answer a request, unless the same page has replaced it by another since."""
        about = (order["client"], order["do"], order.get("metric"))
        if order["do"] not in ("csv", "trace", "log") and any(
            (o["client"], o["do"], o.get("metric")) == about for o in list(self._asked)
        ):
            return
        try:
            self._answer(order)
        except HydrogenError as error:
            self._commands.answer(order, ok=False, text=str(error))

    def _answer(self, order: Order) -> None:
        actions = self._actions
        if actions is None:
            return  # forgotten between the request and here: its page has the final picture
        feed = self._feed or self._begin()
        what = order["do"]
        if what == "hello":
            self._send(*feed.whole(order["client"]))
        elif what == "detail":
            self._answer_detail(feed, order)
        elif what == "show":
            self._show_again(order["what"])
            self._commands.answer(order, ok=True)
        elif what in ("rows", "lanes"):
            (feed.watch if what == "rows" else feed.show_lanes)(order["ranks"])
            if self._is_closed:  # there are no more updates
                self._show_page(self._state)
        else:
            self._maker.make(actions, order)

    def _answer_detail(self, feed: PageFeed, order: Order) -> None:
        try:
            found = feed.detail(order)
        except ValueError as error:  # for a metric that the next attempt has not logged yet
            self._commands.answer(order, ok=False, text=str(error))
        else:
            self._send(*found)

    def _on_file(self, order: Order, made: DownloadFile | str) -> None:
        """Receive a file, or an error message in its place; in the maker's thread."""
        if isinstance(made, str):
            self._commands.answer(order, ok=False, text=made)
            return
        self._commands.answer(order, ok=True)
        self._outgoing.append(parts(made, order))
        if self._is_closed:  # as in _later()
            self._serve(all_of_it=True)

    # ── text, without a page ──

    def _show_text(self, state: GangState, fresh: Sequence[Event]) -> None:
        if self._text is not None:
            self._text.update(state, fresh)
            return
        assert self._opened_at is not None
        if self._is_broken or self._clock() - self._opened_at >= _PATIENCE_S:
            self._start_text().update(state, self._events())

    def _start_text(self) -> TextView:
        self._text = TextView(NotebookOutput(self._display.put_text), clock=self._clock)
        return self._text

    def _return_to_page(self, state: GangState) -> None:
        """A page connected late: it has the printed output, and gets later output."""
        self._text = None
        if self._page is not None:
            self._page.show("\n".join(block(state, state.now_s, _WIDTH)))

    # ── the end ──

    def _leave_picture(self, state: GangState) -> None:
        is_printed = self._text is not None
        drawn = gathered(self._events(), state.gang, self._feed)
        html = drawn.html(state, with_output=not is_printed, is_raised=self._blocking)
        text = block(state, state.now_s, _WIDTH)
        if not is_printed:
            text += [f"[{line.rank}] {without_colour(line.text)}" for line in drawn.last_lines]
        may_come = self._is_heard.is_set() or self._flood.is_recent
        if self._page is not None and (may_come or not is_printed):
            self._picture = html, "\n".join(text)
            self._page.end(*self._picture)
            return
        self._display.put({"text/html": html, "text/plain": "\n".join(text)})
        if self._page is not None:
            self._page.close()
            self._page = None

    def _show_again(self, what: str) -> None:
        """Display again an output that a page lacks: the output itself, or its contents."""
        page = self._page
        if what == "output":
            self._display.put_as_new()
        elif page is not None and self._picture is not None:
            page.end(*self._picture)
            page.free_prompt()
        elif page is not None:
            page.show("\n".join(block(self._state, self._state.now_s, _WIDTH)))

    def fade(self) -> None:
        """Release the gang and its data; pages keep the final picture."""
        with self._serving:
            self._commands.forget()
            self._feed, self._actions, self._state = None, None, GangState()
            self._picture = None
            self._display.forget()

    def end(self) -> None:
        """Close the widget itself."""
        if self._page is not None:
            self._page.close()
            self._page = None
