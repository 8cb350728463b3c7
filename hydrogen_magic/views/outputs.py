"""Output devices of text views: plain lines, a terminal, or a Jupyter kernel."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.events import Notice
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import (
    OutputLine,
    clean,
    clean_name,
    without_colour,
)
from hydrogen_magic.views.output_stream import OutputStream
from hydrogen_magic.views.text_table import as_of, gang_lines, name_and_size, status_line, warnings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from hydrogen_magic.views.widget.rank_displays import RankDisplays


class TextOutput(Protocol):
    """The output device of a :class:`~hydrogen_magic.views.text_view.TextView`."""

    def write(self, lines: Sequence[OutputLine], n_ranks: int) -> None:
        """Write lines of ranks permanently."""

    def display(self, displays: Sequence[ev.Display], n_ranks: int) -> None:
        """Show displays of ranks."""

    def show(self, state: GangState, now_s: float) -> None:
        """Show the gang's state, at a rate and length that suit this device."""

    def close(self, state: GangState | None, now_s: float) -> None:
        """Show the end of the gang (None: only its output is shown) and release resources."""


def _as_lines(displays: Sequence[ev.Display]) -> list[OutputLine]:
    """Return displays as text, for devices without any other type."""
    return [
        OutputLine(display.rank, "stdout", clean(line))
        for display in displays
        for line in display.data.get("text/plain", "").splitlines()
    ]


def _prefix(line: OutputLine, n_ranks: int) -> str:
    return f"[{line.rank}] " if n_ranks > 1 else ""


# ── plain lines ──────────────────────────────────────────────────────────────────────────────────


class PlainOutput:
    """Lines only: without colour or redrawing. For pipes, CI logs and so on."""

    first_interval_s = 5.0
    """A short run prints no lines between its start and its end."""
    last_interval_s = 60.0
    """A run of an hour stays readable: about 60 lines."""

    def __init__(
        self, stdout: TextIO | OutputStream | None = None, stderr: TextIO | None = None
    ) -> None:
        self._stdout = stdout or OutputStream(optional=True)
        self._stderr = stderr or OutputStream("stderr", optional=True)
        self._interval_s = self.first_interval_s
        self._next_status_s: float | None = None
        self._warned: set[str] = set()
        self._n_notices = 0

    def write(self, lines: Sequence[OutputLine], n_ranks: int) -> None:
        for line in lines:
            stream = self._stderr if line.stream == "stderr" else None
            self._print(f"{_prefix(line, n_ranks)}{without_colour(line.text)}", stream)

    def display(self, displays: Sequence[ev.Display], n_ranks: int) -> None:
        self.write(_as_lines(displays), n_ranks)

    def show(self, state: GangState, now_s: float) -> None:
        if self._next_status_s is None:
            self._print(_start_line(state))
            self._next_status_s = now_s + self._interval_s
        self._print_news(state, now_s)
        if now_s >= self._next_status_s and not state.is_terminal:
            self._print(status_line(state, now_s))
            self._interval_s = min(self._interval_s * 1.5, self.last_interval_s)
            self._next_status_s = now_s + self._interval_s

    def close(self, state: GangState | None, now_s: float) -> None:
        if state is not None:
            self._print_news(state, now_s)
            self._print(status_line(state, now_s))

    def _print_news(self, state: GangState, now_s: float) -> None:
        for warned in warnings(state, now_s):
            if warned.key not in self._warned:
                self._warned.add(warned.key)
                self._print(f"gang {state.gang}: {warned.text}")
        for notice in state.notices[self._n_notices :]:
            self._print(f"gang {state.gang}: {_notice(notice)}")
        self._n_notices = len(state.notices)

    def _print(self, text: str, stream: TextIO | OutputStream | None = None) -> None:
        stream = stream or self._stdout
        stream.write(f"{text}\n")
        stream.flush()


def _notice(notice: Notice) -> str:
    return f"{'' if notice.level == 'info' else f'{notice.level}: '}{clean_name(notice.text)}"


def _start_line(state: GangState) -> str:
    places = {"local": "on this machine", "inline": "inside this process"}
    place = places.get(state.placement, f"on {clean_name(state.placement)}")
    title = clean_name(state.title)
    return f"{name_and_size(state)} {place}{f' · {title}' if title else ''}"


# ── terminal ─────────────────────────────────────────────────────────────────────────────────────

_RANK_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


class TerminalOutput:
    """A block that is redrawn at the bottom, with the ranks' output scrolling above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def write(self, lines: Sequence[OutputLine], n_ranks: int) -> None:
        from rich.text import Text

        text = Text("\n").join(self._line(line, n_ranks) for line in lines)
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def display(self, displays: Sequence[ev.Display], n_ranks: int) -> None:
        if lines := _as_lines(displays):
            self.write(lines, n_ranks)

    def show(self, state: GangState, now_s: float) -> None:
        from rich.live import Live

        if any(rank.input_request is not None for rank in state.ranks):
            self._remove_block()
            return
        drawn = self._block(state, now_s)
        if self._live is None:
            # Output of the ranks comes through write(); the kernel's own output is separate.
            self._live = Live(
                drawn,
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(drawn, refresh=True)

    def close(self, state: GangState | None, now_s: float) -> None:
        if state is not None:
            self.show(state, now_s)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _remove_block(self) -> None:
        """Give way to the user's line, which the block would be drawn over."""
        if self._live is not None:
            self._live.transient = True
            self._live.stop()
            self._live = None

    def _line(self, line: OutputLine, n_ranks: int) -> Text:
        from rich.text import Text

        # Only colour marks stderr: a word would break up formatted output.
        style = "red" if line.stream == "stderr" else _RANK_COLOURS[line.rank % len(_RANK_COLOURS)]
        text = Text.from_ansi(line.text, style="red" if line.stream == "stderr" else "")
        return Text.assemble((_prefix(line, n_ranks), style), text)

    def _block(self, state: GangState, now_s: float) -> Text:
        from rich.text import Text

        lines = gang_lines(state, now_s, self._console.width)
        styles = {"!": "yellow", "g": "bold"}
        return Text("\n").join(Text(line, style=styles.get(line[:1], "")) for line in lines)


# ── Jupyter kernel ───────────────────────────────────────────────────────────────────────────────


class NotebookOutput:
    """Output as stream text of the cell; the block as one display that is updated in place.

    A saved notebook contains the block once, in its last state, also after ``nbconvert --execute``.
    ``send`` displays the block in place of the previous one; a quiet view needs none. ``displays`` shows
    displays of ranks; ``cell`` is the request of the cell under which threads write; ``clock`` is in seconds.
    """

    width = 100
    """Width of a line in cells; a notebook's output area is at least this wide on common screens."""
    interval_s = 0.5
    """Interval between updates: short enough to follow, long enough for a slow front end."""

    def __init__(
        self,
        send: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        displays: RankDisplays | None = None,
        cell: Any = None,
    ) -> None:
        self._send = send
        self._cell = cell
        self._displays = displays
        self._clock = clock
        self._shown = ""
        self._shown_at = 0.0
        self._unshown = ""
        """The block of a gang that had ended before it was shown: only output needs it, above."""

    def write(self, lines: Sequence[OutputLine], n_ranks: int) -> None:
        self._put(self._unshown)
        for is_error, group in itertools.groupby(lines, lambda line: line.stream == "stderr"):
            text = "".join(f"{_prefix(line, n_ranks)}{line.text}\n" for line in group)
            self._write("stderr" if is_error else "stdout", text)

    def _write(self, name: str, text: str) -> None:
        if self._cell is not None and threading.current_thread() is not threading.main_thread():
            from hydrogen_magic.views.widget.display import send_under

            # sys.stdout of ipykernel before 6.29 writes under the cell that runs now.
            send_under(self._cell, "stream", {"name": name, "text": text})
            return
        stream: TextIO = getattr(sys, name)
        stream.write(text)
        stream.flush()  # the two streams are sent separately, which would change their order

    def display(self, displays: Sequence[ev.Display], n_ranks: int) -> None:
        if self._displays is None:
            from hydrogen_magic.views.widget.rank_displays import RankDisplays

            self._displays = RankDisplays()
        self._put(self._unshown)
        self._displays.show(displays)

    def show(self, state: GangState, now_s: float) -> None:
        now = self._clock()
        if self._shown and now - self._shown_at < self.interval_s:
            return
        self._shown_at = now
        block = self._block(state, now_s)
        if state.is_terminal and not self._shown:  # its end is shown next
            self._unshown = block
        else:
            self._put(block)

    def close(self, state: GangState | None, now_s: float) -> None:
        if state is not None:
            self._put(self._block(state, now_s))

    def _block(self, state: GangState, now_s: float) -> str:
        """Return the block; until the end, with its time: a notebook that is saved meanwhile keeps it."""
        lines = gang_lines(state, now_s, self.width)
        if not state.is_terminal:
            lines.append(f"{as_of(time.time())}; %gang show {state.gang} shows the present state")
        return "\n".join(lines)

    def _put(self, text: str) -> None:
        self._unshown = ""
        if self._send is not None and text and text != self._shown:
            self._shown = text
            self._send(text)
