"""The notebook view: a live widget if a page can draw it, otherwise text, and a static picture at the end.

A gang is shown in up to three ways, one after another:

- a front end is expected (``display.is_widget_expected``): a widget is displayed, and after its page has
  said hello, the page gets everything, then at most ten messages a second;
- no page has said hello in the three seconds after that, or no front end is expected: the ranks' output is
  printed and a block of text updated in place, from the first event on;
- at the end: a picture of static HTML, which a saved notebook and nbconvert show.

Jupyter's server drops messages of a kernel that sends more than 1,000 a second, ours among them. A page that
finds a gap in their numbers requests everything again.

Commands of pages arrive in other threads while a cell waits, see
:mod:`~hydrogen_magic.views.widget.shell_interceptor`. :meth:`WidgetView.update` answers their requests;
after the end, the thread of the command does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydrogen_magic.core.events import Display, Event
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.views import DETACHED_S, report_fault
from hydrogen_magic.views.outputs import NotebookOutput
from hydrogen_magic.views.text_table import gang_lines, text_while_running
from hydrogen_magic.views.text_view import TextView
from hydrogen_magic.views.widget.display import CellOutput, cell_of_threads, is_widget_expected
from hydrogen_magic.views.widget.live_updates import LiveUpdates
from hydrogen_magic.views.widget.page_commands import CommandHandler, PageCommand
from hydrogen_magic.views.widget.page_requests import PageRequests
from hydrogen_magic.views.widget.rank_displays import RankDisplays
from hydrogen_magic.views.widget.retained_views import retain
from hydrogen_magic.views.widget.static_html import static_view

if TYPE_CHECKING:
    from hydrogen_magic.views.widget.model import Page

_HELLO_TIMEOUT_S = 3.0
"""A page with a widget manager says hello within a second, even for a large notebook."""
_MESSAGE_S = 0.1
"""Ten messages a second appear continuous, and leave the server time."""


class WidgetView:
    """Shows a gang in a notebook; see the module. ``blocking``: a cell waits for the gang."""

    def __init__(
        self,
        gang: Gang,
        *,
        blocking: bool,
        expected: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocking = blocking
        self._expected = is_widget_expected() if expected is None else expected
        self._clock = clock
        self._display = CellOutput()
        self._live = LiveUpdates(gang, is_raised=blocking, clock=clock)
        self._commands = CommandHandler(gang, self._send, self._on_request)
        self._requests = PageRequests(self._live, self._commands, self._send, clock)
        self._displays = RankDisplays()
        self._cell = None if blocking else cell_of_threads()
        self._text: TextView | None = None
        """Shows the gang as text, as long as no page shows it."""
        self._page: Page | None = None
        self._opened_at: float | None = None
        self._next_message_at = 0.0
        self._is_connected = threading.Event()
        """A page has said hello."""
        self._is_broken = False
        """Pages get no more messages, see :meth:`_give_up`."""

    @property
    def interval_s(self) -> float:
        """Seconds between two updates: 0.1, and less if they also read messages of pages."""
        if self._text is not None and not self._blocking:
            return DETACHED_S
        return self._page.interval_s if self._page is not None else _MESSAGE_S

    def update(self, state: GangState, fresh: Sequence[Event]) -> None:
        """Update pages, or the text; answer requests of pages."""
        self._live.update(state, fresh)
        try:
            self._update_pages(state)
        except Exception as error:  # a fault of ours: the gang and its output matter more
            self._give_up(error)
        if self._text is None:  # the text has displays among its lines
            self._displays.show([event for event in fresh if isinstance(event, Display)])
        if not self._is_connected.is_set() and self._is_text_due():
            self._update_text(state, fresh)

    def withdraw_input(self) -> None:
        """Tell pages, which otherwise refuse to run cells until the line is typed."""
        try:
            if self._page is not None:
                self._page.withdraw_input()
        except Exception as error:  # as in update()
            self._give_up(error)

    def close(self, state: GangState) -> None:
        """Show the end; leave a picture in the page and in the saved notebook."""
        self._live.update(state)
        try:
            self._show_end(state)
            self._leave_picture(state)
            self._requests.close()
        except Exception as error:  # as in update()
            self._give_up(error)
            self._update_text(state, ()).close(state)  # there is no picture
        self._text = None
        if self._page is not None:
            retain(self)

    def close_widget(self) -> None:
        """Close the widget itself; pages keep what its output shows."""
        if self._page is not None:
            self._page.close()
            self._page = None

    # ── pages ──

    def _update_pages(self, state: GangState) -> None:
        self._open_once(state)
        if self._page is not None:
            self._page.pump()
        if self._is_connected.is_set():
            self._live.start()
            if self._text is not None:
                self._return_to_page(state)
        if self._clock() >= self._next_message_at:
            self._next_message_at = self._clock() + _MESSAGE_S
            self._send_changes()
            self._requests.serve()

    def _show_end(self, state: GangState) -> None:
        self._open_once(state)
        if self._page is not None:
            self._page.unblock()
        if self._is_connected.is_set():
            self._live.start()
        self._send_changes()
        if self._text is not None:
            self._text.write_rest(state)  # a picture takes the place of the table

    def _open_once(self, state: GangState) -> None:
        if self._opened_at is not None:
            return
        self._opened_at = self._clock()
        if self._expected:
            from hydrogen_magic.views.widget.model import Page  # takes 0.2 s

            self._page = Page(self._display, self._commands.take, blocking=self._blocking)
            self._page.show(text_while_running(state))
        else:
            self._text = self._new_text()

    def _return_to_page(self, state: GangState) -> None:
        """A page connected late: it has the printed output, and gets later output."""
        self._text = None
        if self._page is not None:
            self._page.show(text_while_running(state))

    def _is_text_due(self) -> bool:
        assert self._opened_at is not None
        waited_s = self._clock() - self._opened_at
        return self._text is not None or self._is_broken or waited_s >= _HELLO_TIMEOUT_S

    def _send_changes(self) -> None:
        for message in self._live.messages():
            self._send(*message)

    def _send(self, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        page = self._page
        if page is not None:
            page.send(content, buffers)

    def _on_request(self, request: PageCommand) -> None:
        """Handle a request of a page, in any thread."""
        if self._is_broken:
            return
        if request["do"] == "hello":
            self._is_connected.set()
        self._requests.add(request)

    def _give_up(self, error: Exception) -> None:
        """Continue with text only: messages to pages can no longer be created."""
        what = f"the live view of gang {self._live.state.gang} failed and was replaced by text"
        report_fault(what, error)
        self._is_broken = True
        self._is_connected.clear()
        self._live.stop()
        self._requests.clear()
        page, self._page = self._page, None
        if page is not None:
            with suppress(Exception):  # the same error may occur there too
                page.close()

    # ── text and picture ──

    def _update_text(self, state: GangState, fresh: Sequence[Event]) -> TextView:
        """Show text; if this starts, all output so far, whose displays are shown already."""
        if self._text is None:
            fresh = [event for event in self._live.events() if not isinstance(event, Display)]
            self._text = self._new_text()
        self._text.update(state, fresh)
        return self._text

    def _new_text(self) -> TextView:
        device = NotebookOutput(self._display.show_text, displays=self._displays, cell=self._cell)
        return TextView(device, clock=self._clock)

    def _leave_picture(self, state: GangState) -> None:
        is_printed = self._text is not None
        # Tools such as nbclient, which is no front end, ignore what is printed after the end of its cell.
        with_output = not (is_printed and (self._blocking or self._expected))
        drawn = static_view(self._live.events(), state.gang, self._live.page_updates)
        html = drawn.html(state, with_output=with_output, is_raised=self._blocking)
        lines = gang_lines(state, state.now_s, NotebookOutput.width)
        if with_output:
            lines += drawn.plain_lines(state)
        text = "\n".join(lines)
        if self._page is not None and (self._is_connected.is_set() or not is_printed):
            self._page.end(html, text)
            return
        self._display.show({"text/html": html, "text/plain": text})
        self.close_widget()
