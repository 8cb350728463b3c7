"""``display``, ``update_display`` and ``clear_output`` for code on a rank, with the signatures of IPython's.

They take the place of IPython's own functions when a rank imports IPython, see
:mod:`~hydrogen_magic.node.worker.observe.ipython`.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hydrogen_magic.node.worker.interactive.displays import DisplayQueue
from hydrogen_magic.node.worker.interactive.mime_bundle import as_text, bundle_of, json_text
from hydrogen_magic.node.worker.reporting import reporter

__all__ = ["DisplayHandle", "clear_output", "display", "publish_display_data", "update_display"]


class DisplayHandle:
    """Updates the outputs of one id."""

    def __init__(self, display_id: str | None = None) -> None:
        self.display_id = display_id or uuid.uuid4().hex

    def display(self, obj: Any, **options: Any) -> None:
        """Display ``obj`` as a new output."""
        display(obj, display_id=self.display_id, **options)

    def update(self, obj: Any, **options: Any) -> None:
        """Display ``obj`` in place of the outputs."""
        update_display(obj, display_id=self.display_id, **options)


def display(
    *objects: Any,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    transient: Mapping[str, Any] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    **options: Any,
) -> DisplayHandle | None:
    """Display objects below the cell, or as text in the rank's output if it displays nothing there.

    The arguments are those of ``IPython.display.display``. Raises TypeError for an update without an id.
    """
    transient = dict(transient or {})
    if display_id:
        transient["display_id"] = uuid.uuid4().hex if display_id is True else display_id
    if options.get("update") and not transient.get("display_id"):
        raise TypeError("display_id required for update_display")
    if not objects and display_id:  # an empty output for updates; one without data is not shown
        objects, raw = ({"text/html": ""},), True
    if clear:
        clear_output(wait=True)
    for obj in objects:
        data, about = (obj, {}) if raw else bundle_of(obj, include, exclude)
        if not data and not raw:
            continue  # it has displayed itself, or nothing of it is chosen
        publish_display_data(data, {**about, **(metadata or {})}, transient=transient, **options)
    return DisplayHandle(transient["display_id"]) if display_id else None


def update_display(obj: Any, *, display_id: str, **options: Any) -> None:
    """Display ``obj`` in place of all outputs of this id."""
    display(obj, display_id=display_id, **{**options, "update": True})


def clear_output(wait: bool = False) -> None:
    """Remove the rank's displays, with ``wait`` when the next one is shown; printed text stays."""
    queue = _queue()
    if queue is not None:
        queue.clear(wait=wait)
    elif (of_notebook := _of_notebook("clear_output", clear_output)) is not None:
        of_notebook(wait)


def publish_display_data(
    data: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    transient: Mapping[str, Any] | None = None,
    update: bool = False,
    **_: Any,
) -> None:
    """Display contents by MIME type."""
    queue = _queue()
    if queue is None:
        of_notebook = _of_notebook("publish_display_data", publish_display_data)
        if of_notebook is not None:
            of_notebook(data, metadata, transient=transient, update=update)
        elif "text/plain" in data:
            print(data["text/plain"])
        return
    about = json_text(metadata) if metadata else ""
    display_id = str((transient or {}).get("display_id", ""))
    if update:
        queue.update(as_text(data), about, display_id)
    elif data:
        queue.show(as_text(data), about, display_id)


def shows_below_cell() -> bool:
    """Whether displays of this process appear below the cell."""
    return _queue() is not None


def _of_notebook(name: str, ours: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return IPython's function in the notebook, which may call what a rank has defined; None elsewhere."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_shell is None or get_shell() is None:
        return None
    function = getattr(sys.modules.get("IPython.display"), name, None)
    return None if function is ours else function


def _queue() -> DisplayQueue | None:
    current = reporter.current()
    return None if current is None else current.displays
