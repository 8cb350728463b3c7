"""The display of a notebook's view: one output of the cell, in a front end that may draw widgets."""

from __future__ import annotations

import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from typing import Any

from hydrogen_magic.views import kernel_here, shell_here

BUNDLE = Path(__file__).parent / "static" / "gang.js"
"""The live view as one module; ``make front`` builds it."""

_KERNEL_FILE = re.compile(r"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")


class CellOutput:
    """One output under the cell, updated in place wherever it is shown.

    ``cell``: request of the cell; by default of the one that runs when it is first shown.
    """

    def __init__(self, cell: Any = None) -> None:
        self._id = uuid.uuid4().hex
        self._is_shown = False
        self._cell = cell

    def show(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Show ``data``, by MIME type, in place of the previous display."""
        publish = partial(self._publish, data, metadata)
        if self._is_shown:
            _update(publish)
        elif self._cell is not None and threading.current_thread() is not threading.main_thread():
            # ipykernel 6 would show it under the cell that runs now.
            content = {"data": dict(data), "metadata": dict(metadata or {})}
            transient = {"display_id": self._id}
            send_under(self._cell, "display_data", {**content, "transient": transient})
        else:
            publish()
        self._is_shown = True  # what cannot be sent is shown nowhere

    def show_text(self, text: str) -> None:
        """Show plain text in place of the previous display."""
        self.show({"text/plain": text})

    def _publish(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
        from IPython.display import publish_display_data

        publish_display_data(  # type: ignore[no-untyped-call]
            data=dict(data),
            metadata=dict(metadata or {}),
            transient={"display_id": self._id},
            update=self._is_shown,
        )


def _update(publish: Callable[[], None]) -> None:
    """Publish an update, from any thread.

    A thread of a detached gang carries the context of its own cell. Some clients ignore messages of a cell
    after its end; but an update is found by its id under any cell.
    """
    try:
        Context().run(publish)
    except LookupError:  # ipykernel 7.0 sends no messages outside of a cell
        copy_context().run(publish)


def _captures() -> bool:
    """Return whether the cell captures its outputs, as ``%%capture`` does."""
    from IPython.core.displaypub import CapturingDisplayPublisher

    return isinstance(getattr(shell_here(), "display_pub", None), CapturingDisplayPublisher)


def running_cell() -> Any:
    """Return the shell message that the kernel works on, None outside of any."""
    parent: Any = getattr(kernel_here(), "get_parent", lambda channel: {})("shell")
    return parent if parent and parent.get("header") else None


def cell_of_threads() -> Any:
    """Return the running cell for threads that write later; None if it captures its output."""
    return None if _captures() else running_cell()


def send_under(cell: Any, kind: str, content: Mapping[str, Any]) -> None:
    """Publish a message under a cell, which may have ended; from any thread."""
    kernel = kernel_here()
    ident = f"kernel.{kernel.ident}.{kind}".encode()
    kernel.session.send(kernel.iopub_socket, kind, dict(content), parent=cell, ident=ident)


def is_widget_expected() -> bool:
    """Return whether this kernel shows gangs by a widget: its front end draws them, and ours is built."""
    return BUNDLE.exists() and _front_end_draws_widgets()


def _front_end_draws_widgets() -> bool:
    """Return whether this kernel belongs to a front end that displays widgets to a user.

    Jupyter's server passes the name of the notebook to kernels that it starts for one; tools that only
    execute a notebook do not. VS Code and Colab have their own marks.
    """
    marks = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG")
    return any(os.environ.get(mark) for mark in marks) or "google.colab" in sys.modules


def is_view_needed() -> bool:
    """Return whether the front end opens a widget's model only for an output that shows the widget.

    Jupyter's own front ends open every model at once; VS Code and Colab do so on display.
    """
    return "JPY_SESSION_NAME" not in os.environ


def kernel_id() -> str:
    """Return the kernel's id in its server's API; empty if it has none."""
    from ipykernel.connect import get_connection_file

    try:
        found = _KERNEL_FILE.fullmatch(Path(get_connection_file()).name)
    except (RuntimeError, OSError):  # a kernel without its own process, or its file was removed
        return ""
    return found[1] if found else ""
