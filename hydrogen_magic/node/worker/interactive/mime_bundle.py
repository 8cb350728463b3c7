"""An object as a MIME bundle, by the methods that IPython calls: ``_repr_html_`` and so on.

Hosts of a cluster often have no IPython.
"""

from __future__ import annotations

import base64
import io
import json
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hydrogen_magic.core.events import without_middle
from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.core.units import size_text
from hydrogen_magic.node.worker.interactive.displays import MOST_BYTES

_PLAIN = "text/plain"
_WIDGET = "application/vnd.jupyter.widget-view+json"
"""Refers to a model in this process, which no page can reach."""
_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_pdf_": "application/pdf",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}
_CANARY = "_ipython_canary_method_should_not_exist_"
"""IPython's name for a method that no object has."""
_MOST_TEXT = 20_000
"""Characters of ``text/plain`` beside a richer type."""


def bundle_of(
    obj: Any, include: Collection[str] | None = None, exclude: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of ``obj`` by MIME type, and metadata; no data if it has displayed itself."""
    if _call(obj, "_ipython_display_") is not None:
        return {}, {}
    data: dict[str, Any] = {_PLAIN: _text(obj)}
    metadata: dict[str, Any] = {}
    for more, about in _formats(obj, include, exclude):
        data.update(more)
        metadata.update(about)
    chosen = {
        kind: content
        for kind, content in data.items()
        if (not include or kind in include) and kind not in (exclude or ())
    }
    return chosen, {kind: about for kind, about in metadata.items() if kind in chosen}


def _formats(
    obj: Any, include: Collection[str] | None, exclude: Collection[str] | None
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield parts of the bundle with their metadata; later ones take precedence."""
    for name, kind in _METHODS.items():
        found = _call(obj, name)
        if found is not None:
            content, about = found if isinstance(found, tuple) else (found, None)
            yield {kind: content}, {kind: about} if about else {}
    if is_a(obj, "matplotlib.figure", "Figure") and (obj.axes or obj.lines):
        yield {"image/png": _png(obj)}, {}
    found = _call(obj, "_repr_mimebundle_", include=include, exclude=exclude)
    if found is not None:
        yield found if isinstance(found, tuple) else (found, {})


def _call(obj: Any, name: str, **options: Any) -> Any:
    """Return the result of the method: None if it is missing or fails, True if it returns nothing."""
    method = _method(obj, name)
    if method is None:
        return None
    try:
        found = method(**options)
    except NotImplementedError:
        return None
    except Exception:  # as in a notebook, the other formats are displayed
        traceback.print_exc()
        return None
    return True if name == "_ipython_display_" else found


def _method(obj: Any, name: str) -> Callable[..., Any] | None:
    """Return a method as IPython finds it: not of classes, nor of objects that have every attribute."""
    if isinstance(obj, type):
        return None
    try:
        has_every = getattr(obj, _CANARY, None) is not None
        method = None if has_every else getattr(obj, name, None)
    except Exception:  # __getattr__ may raise anything
        return None
    return method if callable(method) else None


def _text(obj: Any) -> str:
    try:
        return repr(obj)
    except Exception:
        traceback.print_exc()
        return f"<{type(obj).__qualname__}>"


def _png(figure: Any) -> bytes:
    """Return the picture that a notebook shows of a figure, as IPython's ``print_figure`` makes it."""
    file = io.BytesIO()
    figure.savefig(
        file,
        format="png",
        dpi=figure.dpi,
        bbox_inches="tight",
        facecolor=figure.get_facecolor(),
        edgecolor=figure.get_edgecolor(),
    )
    return file.getvalue()


# ── as text for an event ─────────────────────────────────────────────────────────────────────────


def as_text(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents as text: base64 for bytes, JSON text for types of JSON.

    Types that are too large are left out, and ``text/plain`` reports them.
    """
    found = {kind: _encoded(kind, content) for kind, content in data.items() if kind != _WIDGET}
    if len(found) > 1 and _PLAIN in found:
        found[_PLAIN] = without_middle(found[_PLAIN], _MOST_TEXT)
    left_out = []
    while sum(map(len, found.values())) > MOST_BYTES and len(found) > 1:
        kind = max(found, key=lambda each: len(found[each]))
        left_out.append(f"{kind} of {size_text(len(found.pop(kind)))}")
    if left_out:
        limit = f"a display has at most {size_text(MOST_BYTES)}"
        note = f"({', '.join(left_out)} not shown: {limit})"
        found[_PLAIN] = f"{found.get(_PLAIN, '')}\n{note}".lstrip()
    if sum(map(len, found.values())) > MOST_BYTES:
        ((kind, content),) = found.items()
        return {_PLAIN: without_middle(content, MOST_BYTES // 2)}
    return found


def _encoded(kind: str, content: Any) -> str:
    if isinstance(content, (bytes, bytearray, memoryview)):
        return base64.b64encode(content).decode()
    if kind == "application/json" or kind.endswith("+json"):
        return json_text(content)
    return _encodable(content if isinstance(content, str) else str(content))


def json_text(content: Any) -> str:
    """Return ``content`` as JSON, with the text of objects that JSON does not know."""
    # Not in ASCII: an escaped lone surrogate would become one again when the JSON is read.
    return _encodable(json.dumps(content, default=str, ensure_ascii=False))


def _encodable(text: str) -> str:
    """Return ``text`` with U+FFFD in place of lone surrogates, which no message can contain."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
