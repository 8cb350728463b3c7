"""Messages about unpicklable objects: they name the variable and a remedy.

Remedies for objects that pickle itself cannot write are listed here. Those for objects that are refused
(:class:`RefusedError`) are in capture/pickler.py, in node/worker/results, and in ``library_objects`` beside
this module.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.serialization.object_paths import describe, path_to

_BY_DEFAULT = "object"
"""Key of the remedy for all other objects."""

TO_RANKS = {
    "generator": "create it inside the cell, or turn it into a list first",
    "coroutine": "await it inside the cell",
    "socket.socket": "open it inside the cell",
    "sqlite3.Connection": "open the connection inside the cell",
    "sqlite3.Cursor": "open the connection inside the cell",
    "mmap.mmap": "map the file inside the cell",
    "subprocess.Popen": "start the process inside the cell",
    "zipfile.ZipFile": "open the archive inside the cell",
    "frame": "do not keep frames or tracebacks",
    "traceback": "do not keep frames or tracebacks",
    "botocore": "create the client inside the cell",
    "ipywidgets": "assign what the cell needs of it, such as its value, to a variable first",
    "pyspark": "it exists only in the notebook's process: send only the data that the ranks need",
    "psycopg": "open the connection inside the cell",
    "psycopg2": "open the connection inside the cell",
    "sqlalchemy": "connect inside the cell",
    _BY_DEFAULT: "create it inside the cell",
}
"""Remedies for what ranks cannot be sent, by the name of its type (:func:`describe`) or its package."""

TO_NOTEBOOK = {
    "generator": "turn it into a list first",
    "coroutine": "await it first",
    _BY_DEFAULT: "bring back its data instead",
}
"""Remedies for results of ranks."""


class NullFile(io.RawIOBase):
    """A file that discards its data: for a trial."""

    nbytes = 0
    """Written so far."""

    def write(self, data: Any) -> int:
        self.nbytes += len(data)
        return len(data)


class RefusedError(Exception):
    """An object that pickle accepts, but that is useless or different on a rank."""

    def __init__(self, obj: Any, why: str, remedy: str) -> None:
        super().__init__(why)
        self.obj = obj
        self.why = why
        self.remedy = remedy


def refuse(obj: Any, *, why: str, remedy: str) -> Any:
    """Raise RefusedError; the reducer of objects that must not be pickled."""
    raise RefusedError(obj, why, remedy)


def explain(
    name: str,
    value: Any,
    error: BaseException,
    last: Any,
    remedies: Mapping[str, str] = TO_RANKS,
) -> str:
    """Return why variable ``name`` with ``value`` cannot be sent, and a remedy.

    ``name``: empty for the value of a cell. ``last``: the object that pickle had reached at ``error``.
    """
    if isinstance(error.__cause__, RecursionError) or isinstance(error, RecursionError):
        return (
            f"{_expression(name, name)} ({describe(value)}) cannot be sent: it is nested too deeply for "
            "pickle (RecursionError): build it inside the cell, or make it flatter"
        )
    unpicklable = error.obj if isinstance(error, RefusedError) else last
    path = path_to(name, value, unpicklable)
    found = (
        f"{_expression(name, path or name)} ({describe(value if path is None else unpicklable)})"
    )
    inside = "" if path is not None else f", because of a {describe(unpicklable)} inside it,"
    why = error.why if isinstance(error, RefusedError) else _reason(error)
    remedy = _remedy(value, unpicklable, error, remedies)
    return f"{found}{inside} cannot be sent: {why}; {remedy}"


def _expression(name: str, path: str) -> str:
    if name:
        return f"`{path}`"
    return f"`{path}` of its value" if path else "its value"


def _reason(error: BaseException) -> str:
    text = _text(error).strip()
    kind = type(error).__name__
    return (
        text if kind in ("TypeError", "PicklingError") and text else f"{kind}: {text}".rstrip(": ")
    )


def _text(error: BaseException) -> str:
    """Return the message; torch raises errors with a format and its values as arguments."""
    form, *values = error.args or ("",)
    if not values or not isinstance(form, str) or form.count("{}") != len(values):
        return str(error)
    return functools.reduce(lambda text, value: text.replace("{}", str(value), 1), values, form)


def _remedy(value: Any, unpicklable: Any, error: BaseException, remedies: Mapping[str, str]) -> str:
    """Return what to do about ``value`` because of the ``unpicklable`` object in it.

    A remedy for the value itself is the better one: it names what the user has made.
    """
    of_value = None if value is unpicklable else _known_remedy(value, remedies)
    if of_value is None and isinstance(error, RefusedError):
        return error.remedy
    if remedy := of_value or _known_remedy(unpicklable, remedies):
        return remedy
    leave_out = "" if value is unpicklable else ", or leave it out with __getstate__"
    return f"{remedies[_BY_DEFAULT]}{leave_out}"


def _known_remedy(obj: Any, remedies: Mapping[str, str]) -> str | None:
    package = str(type(obj).__module__).partition(".")[0]
    return remedies.get(describe(obj)) or remedies.get(package)
