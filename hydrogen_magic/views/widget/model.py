"""The kernel's side of the widget: its model, and its single display.

The model contains the live view's JavaScript, which npm bundles into one file; data is sent by messages.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from html import escape
from typing import Any

from anywidget import AnyWidget
from traitlets import Bool, Int, Unicode

from hydrogen_magic.views import kernel_here
from hydrogen_magic.views.widget import display
from hydrogen_magic.views.widget.display import CellOutput
from hydrogen_magic.views.widget.shell_interceptor import interceptor_of

_MADE_S = 2.0
"""Much more than the creation of a model takes after its messages have arrived."""
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class GangModel(AnyWidget):
    """The state of a gang in a page's model, which is saved with the notebook: see ``protocol.ts``."""

    _esm = Unicode().tag(sync=True)
    kernel_id = Unicode().tag(sync=True)
    blocking = Bool(False).tag(sync=True)
    place = Unicode().tag(sync=True)
    withdrawn = Int(0).tag(sync=True)


class Page:
    """A widget in front ends that draw one, from its creation to the final picture.

    ``receive`` gets the contents of messages from pages, in any thread. ``blocking``: a cell waits for the
    gang until :meth:`unblock`.
    """

    def __init__(
        self,
        shown: CellOutput,
        receive: Callable[[Mapping[str, Any]], None],
        *,
        blocking: bool,
    ) -> None:
        self._display = shown
        self._context = copy_context()
        self._comm_id = uuid.uuid4().hex
        self._place = f"hm-place-{self._comm_id}"
        """CSS class of the element for the live view."""
        self._is_made = threading.Event()
        self._interceptor = interceptor_of(kernel_here())
        self._is_pumped = blocking and self._interceptor is not None and self._interceptor.is_pumped
        # First: a page may send messages as soon as it has the model.
        if self._interceptor is not None:
            self._interceptor.connect(self._comm_id, self._take, blocking=blocking)
        try:
            self._model = GangModel(
                model_id=self._comm_id,
                _esm=display.BUNDLE.read_text("utf-8"),
                kernel_id=display.kernel_id(),
                blocking=blocking,
                place=self._place,
            )
        except BaseException:
            self.unblock()
            raise
        self._model.on_msg(lambda _, content, buffers: receive(content))
        # The comm's own handler would run cell hooks in this thread (matplotlib draws).
        self._model.comm.handle_msg = self._model._handle_msg
        self._is_made.set()

    def _take(self, message: dict[str, Any]) -> None:
        """Handle a message that bypasses the kernel's main thread."""
        if self._is_made.wait(_MADE_S):
            self._model._handle_msg(message)

    @property
    def interval_s(self) -> float:
        """Interval of calls of :meth:`pump`: a click on Stop appears to be immediate."""
        return 0.05 if self._is_pumped else 0.1

    def pump(self) -> None:
        """Read messages of pages, if no other thread does so while the cell waits."""
        if self._is_pumped and self._interceptor is not None:
            self._interceptor.pump()

    def show(self, text: str) -> None:
        """Show ``text`` until a page draws the live view; a notebook saved meanwhile shows only this."""
        self._put(f"<pre>{escape(text)}</pre>", text, **self._view())

    def _put(self, html: str, text: str, **more: Any) -> None:
        html = f'<div class="{self._place}">{html}</div>'
        self._display.show({**more, "text/html": html, "text/plain": text})

    def send(self, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Send a message to every page that shows the widget; from any thread."""
        # If a thread has no context of its own, ipykernel 7.0 does not know the parent message.
        self._context.copy().run(self._model.send, dict(content), list(buffers))

    def unblock(self) -> None:
        """The cell continues: messages of pages arrive as for any other widget from now on."""
        if self._interceptor is not None:
            self._interceptor.disconnect(self._comm_id)

    def withdraw_input(self) -> None:
        """The cell no longer waits for a line that the user was asked for; called before :meth:`end`."""
        n = self._model.withdrawn + 1
        self._context.copy().run(setattr, self._model, "withdrawn", n)

    def end(self, html: str, text: str) -> None:
        """Leave the final picture in the display and in the saved notebook.

        As long as a page gets messages of the gang, it shows the live view in place of the picture.
        """
        self._context.copy().run(setattr, self._model, "blocking", False)
        self._put(html, text)

    def close(self) -> None:
        """Close the widget; the caller decides on the display in its place."""
        self.unblock()
        self._context.copy().run(self._shut)

    def _shut(self) -> None:
        layout = self._model.layout
        self._model.close()
        layout.close()  # a separate model, which nothing else closes

    def _view(self) -> dict[str, Any]:
        """Return the MIME bundle of the widget itself.

        Left out if the page finds its place without it: trusted notebooks prefer it to all other types, and
        without a kernel it only shows an error message.
        """
        if not display.is_view_needed():
            return {}
        view = {"version_major": 2, "version_minor": 0, "model_id": self._comm_id}
        return {_WIDGET_VIEW: view}
