"""Functions that streams call when they are read, to restore functions, classes and instances.

The kernel and the ranks have this module; :mod:`hydrogen_magic.serialization.pickler` refers to its
functions by name.
"""

from __future__ import annotations

import builtins
import enum
import functools
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

SKELETON_CLASS_ARGS = 4
"""Type, name, bases, keywords; cloudpickle's form of enums is longer, and contains qualified names."""


class Binding(NamedTuple):
    """The name of a function, class or other global in the reader's ``__main__``."""

    name: str
    """Empty: no name."""
    is_writers: bool
    """The writer's ``__main__`` has the same object under that name."""


UNBOUND = Binding("", False)

Registration = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that registers a class with a library, and its arguments after the class."""


class Registrations(NamedTuple):
    """The calls by which a process registers a class with libraries."""

    calls: tuple[Registration, ...] = ()
    know_fields: bool = False
    """They depend on the fields, of which a base of the class knows nothing while there are no attributes."""


Defaults = dict[Any, Any]
"""Default values of arguments, by position or keyword."""

complete_classes: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that need no state from a stream: defined here, or restored by an earlier stream."""


def itself(obj: Any) -> Any:
    """Return ``obj``, which stands for an object around it."""
    return obj


def resolve(module: str, qualname: str) -> Any:
    """Return the object of that name in this process."""
    obj: Any = sys.modules["__main__"] if module == "__main__" else importlib.import_module(module)
    for part in qualname.split("."):
        obj = getattr(obj, part)
    return obj


def find(module: str, qualname: str) -> Any:
    """Return the object of that name in this process, None if there is none."""
    try:
        return resolve(module, qualname)
    except (ImportError, AttributeError):
        return None


def own_attributes(obj: Any) -> dict[str, Any]:
    """Return the attribute dictionary itself, empty if there is none.

    The object's own access to attributes is not used: a proxy may load something.
    """
    try:
        found: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:  # it has slots, or is an array
        return {}
    return found


def restore_sentinel(module: str, name: str, kind: type) -> Any:
    """Return the object of that name and class in this process; a new one if its module has another here."""
    found = _loaded(module, name)
    return found if type(found) is kind else restore_object(kind)


def restore_module_object(module: str, name: str, kind: type) -> Any:
    """Return the object that a module has; an empty one, which it gets, if it has none of that class.

    A function of the module may have made it since the import.
    """
    found = _loaded(module, name)
    if type(found) is kind:
        return found
    made = restore_object(kind)
    if module in sys.modules:
        setattr(sys.modules[module], name, made)
    return made


def _loaded(module: str, name: str) -> Any:
    try:
        return resolve(module, name)
    except Exception:  # a module's code may raise anything: an import in the cell raises it again
        return None


def restore_cell() -> types.CellType:
    """Make an empty closure cell, to be filled later."""
    return types.CellType()


def restore_code(args: tuple[Any, ...], filename: str) -> types.CodeType:
    """Make a code object of that file."""
    return types.CodeType(*args).replace(co_filename=filename)


def restore_module(name: str) -> types.ModuleType:
    """Make a module that cannot be imported."""
    module = types.ModuleType(name)
    vars(module)["__builtins__"] = builtins
    return module


def restore_module_state(module: types.ModuleType, attributes: dict[str, Any]) -> None:
    """Set the attributes of a module."""
    vars(module).update(attributes)


class ImportedOnUse:
    """Stands for a module by which generated code explains why an assertion fails.

    Where there is no such module, its functions return empty texts.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return ImportedOnUse, (self._name,)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(importlib.import_module(self._name), name)
        except ModuleNotFoundError:
            return lambda *args: ""


def restore_function(
    code: types.CodeType,
    home: str | types.ModuleType,
    closure: tuple[types.CellType, ...] | None,
    binding: Binding,
) -> types.FunctionType:
    """Make a function over the globals of module ``home``."""
    if isinstance(home, types.ModuleType):
        module = home
    else:
        module = sys.modules["__main__"] if home == "__main__" else importlib.import_module(home)
    func = types.FunctionType(code, module.__dict__, code.co_name, None, closure)
    _bind(func, binding)
    return func


def restore_function_state(func: types.FunctionType, state: dict[str, Any]) -> None:
    """Set the attributes and closure cells of a function, and globals that the reader lacks."""
    for name, value in state["slots"].items():
        setattr(func, name, value)
    func.__dict__.update(state["attributes"])
    _fill(state["cells"])
    for name, value in state["globals"].items():
        func.__globals__.setdefault(name, value)


def restore_copied_function(
    func: types.FunctionType,
    state: tuple[Callable[..., Any], Any, list[tuple[types.CellType, Any]]],
) -> None:
    """Set the state of a function that has globals of its own, and closure cells."""
    set_state, attributes, cells = state
    set_state(func, attributes)
    _fill(cells)


def _fill(cells: list[tuple[types.CellType, Any]]) -> None:
    for cell, contents in cells:
        cell.cell_contents = contents


def restore_class(
    make: Callable[..., type], args: tuple[Any, ...], binding: Binding, is_quiet: bool
) -> type:
    """Make a class without its attributes. ``is_quiet``: no ``__init_subclass__`` hook runs."""
    cls = _make_quietly(make, args, is_quiet)
    _bind(cls, binding)
    return cls


def _make_quietly(make: Callable[..., type], args: tuple[Any, ...], is_quiet: bool) -> type:
    """Make a class; the notebook's hooks and the code of its metaclasses do not run again.

    ``is_quiet``: hooks of libraries do not run, either.
    """
    if len(args) != SKELETON_CLASS_ARGS + 2:
        return make(*args)
    kind, name, bases, *rest = args
    if _has_notebooks_code(kind):
        kind = functools.partial(_made_by_library, kind)
    if not _has_hook(bases, is_quiet):
        return make(kind, name, bases, *rest)
    first = types.resolve_bases(bases)[0]
    quiet = _Quiet if first.__dictoffset__ else _QuietWithSlots  # Python compares their layouts
    cls = make(kind, name, (quiet, *bases), *rest)
    cls.__bases__ = types.resolve_bases(bases)
    return cls


def _has_notebooks_code(metaclass: type) -> bool:
    """Whether the notebook says how classes of ``metaclass`` are made: that needs the body of the class."""
    own = (vars(base) for base in metaclass.__mro__ if base.__module__ == "__main__")
    return any(not attributes.keys().isdisjoint(MAKING) for attributes in own)


MAKING = {"__init__", "__new__", "__prepare__"}
"""Methods of a metaclass that are called when a class is made."""


def _made_by_library(
    metaclass: type, name: str, bases: tuple[type, ...], attributes: dict[str, Any]
) -> Any:
    """Make a class of ``metaclass`` as the first of its bases does that is not the notebook's."""
    library: Any = next(base for base in metaclass.__mro__ if base.__module__ != "__main__")
    cls = library.__new__(metaclass, name, bases, attributes)
    library.__init__(cls, name, bases, attributes)
    return cls


def make_enum(
    track: Callable[..., type], kind: Any, bases: tuple[type, ...], name: str, *rest: Any
) -> type:
    """Make an enum of metaclass ``kind`` with its members; cloudpickle uses the metaclass of its base.

    Code of the notebook's metaclasses does not run again. ``track``: cloudpickle's function by which a class
    that is read twice is the same class.
    """
    qualname, members, module, tracker, _ = rest
    library: Any = next(base for base in kind.__mro__ if base.__module__ != "__main__")
    body = library.__prepare__(name, bases)
    for member, value in members.items():
        body[member] = _as_member(value)
    cls = library.__new__(kind, name, bases, body)
    cls.__module__, cls.__qualname__ = module, qualname
    return track(tracker, cls)


def _as_member(value: Any) -> Any:
    """Return what makes a member of ``value`` in the body of an enum, where functions are methods."""
    if sys.version_info >= (3, 11) and (hasattr(value, "__get__") or isinstance(value, type)):
        return enum.member(value)
    return value


class _Quiet:
    """A first base class that prevents the hooks of the other bases from running."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing."""


class _QuietWithSlots:
    """The same beside bases without attribute dictionaries."""

    __slots__ = ()

    __init_subclass__ = vars(_Quiet)["__init_subclass__"]


def _has_hook(bases: tuple[Any, ...], is_quiet: bool) -> bool:
    """Whether a base has a hook of the notebook, or any hook if ``is_quiet``."""
    hooks = (
        getattr(base.__init_subclass__, "__func__", None) for base in types.resolve_bases(bases)
    )
    return any(is_quiet or hook.__globals__.get("__name__") == "__main__" for hook in hooks if hook)


def restore_class_state(
    cls: Any,
    state: tuple[
        Callable[..., Any],
        Any,
        dict[str, Any],
        dict[str, dict[str, Any]],
        tuple[Registration, ...],
    ],
) -> None:
    """Set the attributes of a class and of an enum's members, and register it.

    Does nothing to a class that this process already had.
    """
    set_state, attributes, companions, members, registrations = state
    for name, value in companions.items():
        sys.modules["__main__"].__dict__.setdefault(name, value)
    if cls in complete_classes:
        return
    set_state(cls, attributes)
    for name, of_member in members.items():
        vars(cls[name]).update(of_member)
    for register, args in registrations:
        with suppress(ValueError):  # a hook of the library has registered it
            register(cls, *args)
    complete_classes.add(cls)


BASES, METACLASS = ".bases", ".metaclass"
"""Names in the code of a class statement that no other code has."""


def restore_class_by_statement(
    code: types.CodeType,
    name: str,
    given: dict[str, Any],
    names: dict[str, Any],
    binding: Binding,
    contains_itself: list[str],
) -> Any:
    """Make a class by its statement. ``given``: its bases and metaclass. ``names``: globals that it reads.

    ``contains_itself``: not empty if one of them refers to the class, which exists by now.
    """
    if contains_itself:
        return None  # pickle drops it
    main, own = vars(sys.modules["__main__"]), dict(given)
    before = {each: main.get(each, UNBOUND) for each in names}
    main.update(names)
    try:
        exec(code, main, own)
    finally:
        main.update(before)
        for each in [each for each, value in before.items() if value is UNBOUND]:
            del main[each]
    cls = own[name]
    _bind(cls, binding)
    return cls


def restore_later_state(
    cls: Any,
    state: tuple[Callable[..., Any], dict[str, Any], dict[str, Any], dict[str, list[Defaults]]],
) -> None:
    """Set what a statement has not given its class: attributes, names that its methods read, and defaults."""
    set_state, attributes, names, defaults = state
    for name, value in names.items():
        vars(sys.modules["__main__"]).setdefault(name, value)
    own = vars(cls)
    differing = {
        name: value for name, value in attributes.items() if not _is_equal(own.get(name), value)
    }
    set_state(cls, (differing, {}))
    for name, of_functions in defaults.items():
        for function, values in zip(functions_in(own.get(name)), of_functions, strict=False):
            _set_defaults(function, values)


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions in a method, class method or property."""
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, (staticmethod, classmethod)):
        parts = [value.__func__]
    yield from (each for each in parts if type(each) is types.FunctionType)


def _set_defaults(function: types.FunctionType, values: Defaults) -> None:
    positional, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    function.__defaults__ = tuple(values.get(n, one) for n, one in enumerate(positional)) or None
    keywords.update({name: values[name] for name in keywords if name in values})


def _is_equal(one: Any, other: Any) -> bool:
    """Whether both are equal values of Python's own types."""
    return type(one) is type(other) and type(one) in ATOMS and bool(one == other)


ATOMS = (bool, bytes, complex, float, int, str, type(None))
"""Types whose values have neither parts nor an identity that matters."""


def _bind(obj: Any, binding: Binding) -> None:
    if binding.name:
        sys.modules["__main__"].__dict__.setdefault(binding.name, obj)
    if binding.is_writers:
        # A class that its metaclass lists is made within itself; pickle drops the outer one.
        _writers.setdefault(binding.name or obj.__qualname__, obj)


_writers: dict[str, Any] = {}
"""Objects of streams that their writer's ``__main__`` also has; see :func:`take_writers`."""


def take_writers() -> dict[str, Any]:
    """Return the objects read since the last call that can go back to their writer by name."""
    taken = dict(_writers)
    _writers.clear()
    return taken


def restore_global(
    kind: Any, binding: Binding, args: tuple[Any, ...], options: dict[str, Any] | None
) -> Any:
    """Make an object whose class pickles it as a global.

    ``options`` is None for one whose state follows. Such objects are compared by identity, so that of
    ``__main__`` is used if there is one.
    """
    if options is not None:
        # These take the module of their caller for their own.
        names = {"__name__": "__main__", "kind": kind, "args": args, "options": options}
        obj = eval("kind(*args, **options)", names)
    else:
        known = vars(sys.modules["__main__"]).get(binding.name)
        obj = known if type(known) is kind else kind.__new__(kind)
    _bind(obj, binding)
    return obj


def restore_object(cls: type, *args: Any) -> Any:
    """Make an object without its state; its class may differ from that of the writer's object."""
    try:
        return cls.__new__(cls, *args)
    except TypeError:
        if args:
            raise
        # A __new__ with arguments that only the writer had, as that of jax.custom_vjp.
        return next(base for base in (dict, list, object) if issubclass(cls, base)).__new__(cls)


def restore_by_library(is_called: bool, library: Any, cls: type, *args: Any) -> Any:
    """Make an instance of ``cls`` by its base class. ``is_called``: pickle would call the class itself."""
    obj = library.__new__(cls, *args)
    if is_called and library.__init__ is not object.__init__:
        library.__init__(obj, *args)
    return obj


def restore_same(obj: Any) -> Any:
    return obj
