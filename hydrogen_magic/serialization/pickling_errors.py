"""Messages about unpicklable objects: they name the variable and a remedy."""

from __future__ import annotations

import functools
import io
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from hydrogen_magic.serialization.reducers import own_attributes

_MAX_OBJECTS = 200_000
"""Maximum number of objects searched for the path of the unpicklable one; more take over a second."""

_LONGEST_PATH = 100
"""Characters of an expression; a longer one, through the insides of a library, helps no user."""

_REMEDIES = {
    "generator": "create it inside the cell, or turn it into a list first",
    "coroutine": "await it inside the cell",
    "socket.socket": "open it inside the cell",
    "sqlite3.Connection": "open the connection inside the cell",
    "sqlite3.Cursor": "open the connection inside the cell",
    "mmap.mmap": "map the file inside the cell",
    "weakref.ReferenceType": "keep the object itself, or look it up inside the cell",
    "subprocess.Popen": "start the process inside the cell",
    "frame": "do not keep frames or tracebacks",
    "traceback": "do not keep frames or tracebacks",
}

_REMEDIES_BY_PACKAGE = {
    "botocore": "create the client inside the cell",
    "ipywidgets": "assign what the cell needs of it, such as its value, to a variable first",
    "pyspark": "it exists only in the notebook's process: send only the data that the ranks need",
    "psycopg": "open the connection inside the cell",
    "psycopg2": "open the connection inside the cell",
    "sqlalchemy": "connect inside the cell",
}


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
    name: str, value: Any, error: BaseException, last: Any, advice: str | None = None
) -> str:
    """Return why variable ``name`` with ``value`` cannot be sent, and a remedy.

    ``name``: empty for the value of a cell. ``last``: the object that pickle had reached at ``error``.
    ``advice``: remedy for an object without a specific one; by default, to create it inside the cell.
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
    remedy = (
        error.remedy if isinstance(error, RefusedError) else advice or _remedy(unpicklable, value)
    )
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


def describe(obj: Any) -> str:
    """Return the name of the type of ``obj``."""
    kind = type(obj)
    if kind is types.FunctionType or issubclass(kind, type):
        return "function" if kind is types.FunctionType else f"class {obj.__qualname__}"
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return kind.__qualname__ if kind.__qualname__.startswith(module) else module + kind.__qualname__


def _remedy(unpicklable: Any, value: Any) -> str:
    """Return what to do about ``unpicklable``, which is somewhere in the variable's ``value``."""
    kind = type(unpicklable)
    known = _REMEDIES.get(f"{kind.__module__}.{kind.__qualname__}") or _REMEDIES.get(
        kind.__qualname__
    )
    packages = (str(type(obj).__module__).partition(".")[0] for obj in (value, unpicklable))
    by_package = next(filter(None, map(_REMEDIES_BY_PACKAGE.get, packages)), None)
    return by_package or known or "create it inside the cell, or leave it out with __getstate__"


def path_to(name: str, value: Any, wanted: Any) -> str | None:
    """Return an expression that leads from variable ``name`` to the object ``wanted``.

    None if there is none, or only a long one.
    """
    path = find_path(name, value, lambda obj: obj is wanted)
    return None if path is None or len(path) > _LONGEST_PATH else path


def find_path(name: str, value: Any, is_wanted: Callable[[Any], bool]) -> str | None:
    """Return an expression that leads from variable ``name`` to the nearest object of its kind."""
    return next((path for path, obj in walk(name, value) if is_wanted(obj)), None)


def walk(
    name: str, value: Any, is_left_out: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[str, Any]]:
    """Yield the objects that ``value`` refers to, nearest first, each with an expression for its
    path, and without those behind a path that ``is_left_out``.

    An object may be repeated with another path. Stops after :data:`_MAX_OBJECTS`.
    """
    todo = deque([(name, value)])
    seen: dict[int, Any] = {}
    while todo:
        path, obj = todo.popleft()
        yield path, obj
        if id(obj) not in seen and len(seen) <= _MAX_OBJECTS:
            seen[id(obj)] = obj
            found = (each for each in children(path, obj) if not is_left_out(each[0]))
            todo.extend(islice(found, _MAX_OBJECTS))


def children(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that ``obj`` refers to, with the expression that leads there from ``path``.

    The code of its class is not called: its ``__iter__`` may change the object.
    """
    kind = type(obj)
    if kind in (str, bytes, int, float, bool, type(None), types.ModuleType):
        return
    if issubclass(kind, dict):
        for place, (key, item) in enumerate(list(islice(dict.items(obj), _MAX_OBJECTS))):
            yield f"{path}[{_short(key, place)}]", item
    elif issubclass(kind, (list, tuple)):
        items = list.__iter__(obj) if issubclass(kind, list) else tuple.__iter__(obj)
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(items))
    elif issubclass(kind, (set, frozenset)):
        members = set.__iter__(obj) if issubclass(kind, set) else frozenset.__iter__(obj)
        yield from ((f"{path}{{{place}}}", item) for place, item in enumerate(members))
    elif kind is types.FunctionType:
        yield from _of_function(path, obj)
        return
    elif kind is types.MethodType:
        yield from ((f"{path}.__self__", obj.__self__), (f"{path}.__func__", obj.__func__))
    elif issubclass(kind, functools.partial):
        yield from ((f"{path}.{name}", getattr(obj, name)) for name in ("func", "args", "keywords"))
    if issubclass(kind, type) and obj.__module__ != "__main__":
        return
    yield from _attributes(path, obj)


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from variables_of(path, function)
    if function.__module__ == "__main__":
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


def variables_of(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function itself holds, without those it looks up by name."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f"{path}()'s variable {name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"{path}()'s default", default) for default in defaults)
    yield from ((f"{path}.{name}", item) for name, item in function.__dict__.items())


def _attributes(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    attributes = list(own_attributes(obj).items())
    yield from ((f"{path}.{name}", item) for name, item in attributes)
    if not issubclass(type(obj), type):
        yield from _slots(path, obj)


def _slots(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            descriptor = base.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    yield f"{path}.{name}", descriptor.__get__(obj)
                except AttributeError:  # not assigned
                    continue


def _short(key: Any, place: int) -> str:
    is_plain = type(key) in (str, int, float, bool)
    text = repr(key) if is_plain else f"{describe(key)} {place}"
    return text if len(text) < 40 else text[:37] + "..."
