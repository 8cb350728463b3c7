"""How functions, classes and modules are found by name, here and in another process."""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from typing import Any

from hydrogen_magic.serialization.code_names import global_names
from hydrogen_magic.serialization.instances import find_on_type, own_attributes, restore_object


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


def is_main(obj: Any) -> bool:
    """Whether ``obj``, a function or class, is defined in the notebook."""
    return getattr(obj, "__module__", None) == "__main__"


def importable_name(module: types.ModuleType) -> str | None:
    """Return the name under which a module can be imported, None if that gives another file, or nothing.

    Does not access the module itself: a lazy one would load.
    """
    attributes = object.__getattribute__(module, "__dict__")
    name = attributes.get("__name__")
    if not isinstance(name, str) or name not in sys.modules:
        return None
    found = sys.modules[name]
    is_same = found is module or names_of(name).get("__file__") == attributes.get("__file__")
    return name if is_same else None


def exported_as(cls: type) -> tuple[str, str] | None:
    """Return the module and name that a library has a class by, if not those that the class itself gives.

    ``jax.Array`` has another name. Classes of some extension modules, such as ``safetensors.safe_open``, say
    that they are builtins. None for others, such as those that ``cloudpickle.register_pickle_by_value`` has
    sent by value.
    """
    own = cls.__module__
    names = names_of(own)
    if is_main(cls) or names.get(cls.__qualname__) is cls:
        return None
    if own == "builtins":
        places = ((name, cls.__name__) for name in list(sys.modules) if name != "__main__")
    else:
        places = ((own, name) for name, value in names.items() if value is cls)
    return next((place for place in places if names_of(place[0]).get(place[1]) is cls), None)


def names_of(module: str) -> dict[str, Any]:
    """Return the contents of a loaded module as they are stored; none if another object has its place."""
    found = sys.modules.get(module)
    is_module = issubclass(type(found), types.ModuleType)
    return object.__getattribute__(found, "__dict__") if is_module else {}


def module_of(func: types.FunctionType) -> types.ModuleType | None:
    """Return the module whose globals ``func`` uses; its ``__module__`` is only a label."""
    name = func.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    namespace = None if module is None else object.__getattribute__(module, "__dict__")
    return module if namespace is func.__globals__ else None


def own_globals(func: types.FunctionType) -> dict[str, Any]:
    """Return the globals that ``func`` reads, if they are those of no module; otherwise none.

    ``exec`` makes such functions, and so do libraries that generate methods.
    """
    if module_of(func) is not None:
        return {}
    names = (name for name in global_names(func.__code__) if name in func.__globals__)
    return {name: func.__globals__[name] for name in names}


def generated_imports(func: types.FunctionType) -> dict[str, Any]:
    """Return the modules that ``func`` reads under names which no source can have: ``@pytest_ar``.

    pytest imports them into a module whose assertions it rewrites; the reader imports its source as it is.
    """
    names = (name for name in global_names(func.__code__) if not name.isidentifier())
    found = {name: func.__globals__.get(name) for name in names}
    modules = {name: one for name, one in found.items() if type(one) is types.ModuleType}
    return {name: ImportedOnUse(one.__name__) for name, one in modules.items()}


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


def is_of_class_method(func: types.FunctionType) -> bool:
    """Whether ``func`` is the function of a class method of a library.

    A class may contain that of another one: generic named tuples have the one of ``typing.Generic``.
    """
    if is_main(func) or "." not in func.__qualname__ or func.__module__ not in sys.modules:
        return False
    return getattr(find(func.__module__, func.__qualname__), "__func__", None) is func


def is_importable(obj: Any, name: str) -> bool:
    try:
        module = pickle.whichmodule(obj, name)  # type: ignore[attr-defined]  # typeshed lacks it
    except pickle.PicklingError:  # Python 3.14: another object has the name
        return False
    return module != "__main__" and find(module, name) is obj


def stands_for_a_function(obj: Any) -> bool:
    """Whether a library has wrapped a function of the notebook: the wrapper may be pickled by its name."""
    attributes = own_attributes(obj)
    if type(attributes) is not dict or attributes.get("__module__") != "__main__":
        return False
    return isinstance(find_on_type(type(obj), "__reduce__"), types.FunctionType)


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
