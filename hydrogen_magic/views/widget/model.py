"""The page's side of a view, seen from the kernel: a widget's model, and the one display of it.

The model carries the live view's JavaScript, built by npm into one file; data go by messages.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from html import escape
from typing import Any

from anywidget import AnyWidget
from ipywidgets import __protocol_version__  # type: ignore[import-untyped]  # it has no stubs
from traitlets import Bool, Unicode

from hydrogen_magic.views.widget import display
from hydrogen_magic.views.widget.display import (
    Display,
    ipython_kernel,
    running_cell,
    send_under,
)
from hydrogen_magic.views.widget.shell_interceptor import ShellInterceptor, switchboard

__all__ = ["GangModel", "Page"]

_MADE_S = 2.0
"""Far more than it takes to make a model whose messages come already."""
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class GangModel(AnyWidget):
    """What is kept in a page's model of a gang, and saved with the notebook: see ``protocol.ts``."""

    _esm = Unicode().tag(sync=True)
    gang_id = Unicode().tag(sync=True)
    kernel_id = Unicode().tag(sync=True)
    blocking = Bool(False).tag(sync=True)
    place = Unicode().tag(sync=True)
    session = Unicode().tag(sync=True)


class Page:
    """A widget in front ends that draw one, from its opening to the picture that stays.

    ``receive`` gets the content of what pages send, from any thread.
    """

    def __init__(self, shown: Display, receive: Callable[[Mapping[str, Any]], None]) -> None:
        self._display = shown
        self._receive = receive
        self._context = copy_context()
        self._comm_id = uuid.uuid4().hex
        self._place = f"hm-place-{self._comm_id}"
        """Class of the element that a page puts the live view into."""
        self._model: GangModel | None = None
        self._is_made = threading.Event()
        self._board: ShellInterceptor | None = None
        self._is_pumped = False
        self._cell: Any = None
        """Request of the cell that shows the widget."""

    def open(self, gang_id: str, *, blocking: bool) -> None:
        """Make the widget; ``blocking``: a cell waits for the gang until :meth:`unblock`."""
        self._board = switchboard(ipython_kernel())
        self._cell = running_cell()
        self._is_pumped = blocking and self._board is not None and self._board.is_pumped
        if self._board is not None:  # first: a page may speak as soon as it hears of the model
            self._board.connect(self._comm_id, self._take, blocking=blocking)
        model = GangModel(
            model_id=self._comm_id,
            _esm=display.BUNDLE.read_text("utf-8"),
            gang_id=gang_id,
            kernel_id=display.kernel_id(),
            blocking=blocking,
            place=self._place,
            session=self._cell["header"].get("session", "") if self._cell else "",
        )
        model.on_msg(lambda _, content, buffers: self._receive(content))
        # The comm's own would call what hangs on cells, in whatever thread this is (matplotlib draws).
        model.comm.handle_msg = model._handle_msg
        self._model = model
        self._is_made.set()

    def _take(self, message: dict[str, Any]) -> None:
        """Take a message that comes past the kernel's main thread."""
        if self._is_made.wait(_MADE_S) and self._model is not None:
            self._model._handle_msg(message)

    @property
    def interval_s(self) -> float:
        """How often :meth:`pump` wants to be called: a click on Stop is felt as immediate."""
        return 0.05 if self._is_pumped else 0.1

    def pump(self) -> None:
        """Read what pages have sent, where nobody else does while the cell waits."""
        if self._is_pumped and self._board is not None:
            self._board.pump()

    def show(self, text: str) -> None:
        """Show ``text`` until a page puts the live view there; a saved notebook shows nothing else."""
        note = f"{text}\nstill running when this was saved"
        self._put(f"<pre>{escape(note)}</pre>", note, **self._view())

    def _put(self, html: str, text: str, **more: Any) -> None:
        html = f'<div class="{self._place}">{html}</div>'
        self._display.put({**more, "text/html": html, "text/plain": text})

    def send(self, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Send a message to every page that shows the widget; from any thread."""
        # Where a thread has no context of its own, ipykernel 7.0 does not know what it answers to.
        if self._model is not None:
            self._context.copy().run(self._model.send, dict(content), list(buffers))

    def unblock(self) -> None:
        """The cell goes on: what pages send comes as for any other widget now."""
        if self._board is not None:
            self._board.disconnect(self._comm_id)

    def end(self, html: str, text: str) -> None:
        """Leave the final picture in the display and in the notebook as saved.

        As long as a page hears of the gang, it puts the live view in the picture's place.
        """
        self._context.copy().run(self._set_unblocked)
        self._put(html, text)

    def free_prompt(self) -> None:
        """Report once more that the cell is idle, when it is: pages that missed it show ``[*]`` for ever.

        They ignore it where they have heard it before. The kernel's loop runs as soon as no cell does.
        """
        loop = getattr(ipython_kernel(), "io_loop", None)
        if loop is not None and self._cell is not None:
            idle = {"execution_state": "idle"}
            loop.add_callback(send_under, self._cell, "status", idle)

    def open_again(self) -> None:
        """Have pages make the widget anew; where none has heard of it, there is nothing to close."""
        self._context.copy().run(self._announce)

    def _announce(self) -> None:
        assert self._model is not None, "what is announced again was opened"
        for widget in (self._model.layout, self._model):
            widget.comm.close(deleting=True)  # it stays the kernel's
            data = {"state": widget.get_state(), "buffer_paths": []}
            widget.comm.open(data, {"version": __protocol_version__})

    def _set_unblocked(self) -> None:
        assert self._model is not None, "what ends was opened"
        self._model.blocking = False

    def close(self) -> None:
        """Take the widget back; what is displayed in its place is up to the caller."""
        self.unblock()
        if self._model is not None:
            self._context.copy().run(self._shut)

    def _shut(self) -> None:
        assert self._model is not None, "what is shut was opened"
        layout = self._model.layout
        self._model.close()
        layout.close()  # a model of its own, which nobody else closes

    def _view(self) -> dict[str, Any]:
        """Return what shows the widget itself.

        Left out where the page finds its place without it: notebooks that are trusted prefer it to all
        else, and where the kernel is gone it is nothing but an error message.
        """
        if not display.is_view_needed():
            return {}
        view = {"version_major": 2, "version_minor": 0, "model_id": self._comm_id}
        return {_WIDGET_VIEW: view}
