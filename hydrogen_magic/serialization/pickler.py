"""The pickler: cloudpickle, with additions for gangs of ranks.

In addition to cloudpickle, this pickler

- puts torch storages out of band, once per storage, so that views and tied weights stay shared;
- keeps the file names of functions, so that tracebacks show the notebook's lines;
- keeps the variables that several closures share (``nonlocal``) shared;
- gives functions defined inside an importable module that module's own globals, not a copy of them;
- lets lazily loading modules travel by name, and functions of a module that is sent by value use its globals;
- keeps the qualified names of nested classes, so that plain ``pickle`` finds them;
- sends globals of ``__main__`` by value that are neither functions nor classes, such as a ``ParamSpec``.

Subclasses define how functions and classes of ``__main__`` are pickled. Streams call the
``restore_*`` functions when they are read; the kernel and the ranks have them.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import cloudpickle

from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.serialization import classes, functions, library_objects
from hydrogen_magic.serialization.bindings import UNBOUND, Binding, restore_global
from hydrogen_magic.serialization.classes import Registrations
from hydrogen_magic.serialization.importable import (
    exported_as,
    generated_imports,
    importable_name,
    is_importable,
    is_main,
    is_of_class_method,
    module_of,
    resolve,
    stands_for_a_function,
)
from hydrogen_magic.serialization.instances import (
    find_on_type,
    is_made_by_library,
    reduce_by_library,
    reduce_by_value,
    reduce_instance,
    restore_same,
)
from hydrogen_magic.serialization.library_objects import (
    numpy_arrays,
    pandas_frames,
    standard_library,
    tensor_storages,
    weak_references,
)
from hydrogen_magic.serialization.memory_layout import Memory, MemoryLayout

_UNKNOWN: Any = object()
"""Stands for the handler of a class that was not met before."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles objects for a process of the same Python on the same or another machine."""

    memo: Any
    """Of the standard library: ``id`` of an object -> its index in the stream, and the object."""
    main_by_value = False
    """Functions of ``__main__`` use the reader's ``__main__`` as globals (otherwise a dict of their own)."""
    tracks_classes = True
    """A class that is read twice in one process is the same class, as with cloudpickle."""
    tracks_sharing = True
    """Whether the stream tells that an object outside of it has the same attributes, or a frame the same
    memory. Digests of contents leave that out: it changes when a value is only read."""
    cuda_travels_as = "cpu"
    """Target of CUDA storages: ``cpu``, or ``cuda`` for the reader's own GPU."""

    def __init__(
        self,
        file: Any,
        protocol: int | None = None,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
    ) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
        self.last: object = None
        """The last object visited; when pickling fails, it is most likely the unpicklable one."""
        self.layout = MemoryLayout()
        self._storages: dict[int, Any] = {}
        self._rebuild_tensor: Any = None
        self._not_modules: set[str] = set()
        self._modules: dict[int, types.ModuleType] = {}
        """Modules that are sent by value, by the ``id`` of their attribute dictionaries."""
        self._bare_cells: dict[int, types.CellType] = {}
        self._filled_cells: set[int] = set()
        self._section: tuple[list[Any], dict[int, types.CellType], set[int]] = ([], {}, set())
        self.handlers: dict[type, Callable[[Any], Any] | None] = {
            types.CellType: self._reduce_cell,
            types.CodeType: self._reduce_code,
            Memory: lambda memory: (restore_same, (memory.buffer(),)),
            standard_library.CachedFunction: self._reduce_cached_function,
            **dict.fromkeys(standard_library.PICKLED_BY_NAME, self._reduce_named),
            pandas_frames.SharedRefs: self._reduce_shared_refs,
            **standard_library.OF_CLASSES,
            **weak_references.OF_CLASSES,
        }
        self._add_storage_handlers()
        self._add_numpy_handlers()

    def clear_memo(self) -> None:
        """Let go of all objects that were pickled.

        Python's own releases them one by one from a table in which the released ones still are. CPython's
        collector reads this table from 3.11 on: if a finalizer runs it, or lets another thread run it, the
        process crashes. So all are held until the table is empty.
        """
        held = gc.get_referents(self)
        super().clear_memo()
        del held

    def release(self) -> None:
        """Drop the references to all objects that were pickled."""
        self.clear_memo()
        self.last, self.layout = None, MemoryLayout()
        self._storages, self._modules, self._bare_cells = {}, {}, {}
        self._section = [], {}, set()

    def written(self) -> Iterable[Any]:
        """Return the objects that later ones can refer to, and a few others."""
        if sys.version_info >= (3, 11):
            return gc.get_referents(self)  # a copy of the memo takes a second for a million objects
        return [obj for _, obj in self.memo.copy().values()]

    # ── hooks for subclasses ──────────────────────────────────────────────────────────────────────

    def is_of_main(self, func: types.FunctionType) -> bool:
        """Whether the globals of ``func`` are the namespace of ``__main__``."""
        return func.__globals__ is vars(sys.modules["__main__"])

    def globals_for(self, function: types.FunctionType) -> dict[str, Any]:
        """Return the globals of ``__main__`` that must be sent with ``function``."""
        return {}

    def module_over(self, names: dict[str, Any]) -> types.ModuleType | None:
        """Return the module, sent by value, with these global names."""
        return self._modules.get(id(names))

    def companions(self, cls: type) -> dict[str, Any]:
        """Return other names that the reader's ``__main__`` needs to look up ``cls`` by name."""
        return {}

    def is_replacement(self, func: Any) -> bool:
        """Whether the notebook has put ``func`` in the place that it names: the reader has another there."""
        return False

    def registrations(self, cls: type) -> Registrations:
        """Return the calls by which the reader registers ``cls`` with libraries."""
        return Registrations()

    def binding(self, obj: Any, name: str) -> Binding:
        """Return the name in the reader's ``__main__`` for ``obj``, which calls itself ``name``."""
        return UNBOUND

    def default_of(self, value: Any) -> Any:
        """Return what is written for the default value of a parameter."""
        return value

    def handler_of(self, kind: type) -> Callable[[Any], Any] | None:
        """Return the function that reduces objects of class ``kind``; None: pickle does."""
        return library_objects.handler_of(kind)

    # ── sections of a stream ─────────────────────────────────────────────────────────────────────

    def begin_section(self) -> None:
        """Write a mark, which the reader loads before the section's object."""
        self._section = [], dict(self._bare_cells), set(self._filled_cells)
        self.dump(self._section[0])

    def take_back_section(self) -> None:
        """Forget the objects written since the mark: later ones will not refer to them."""
        mark, self._bare_cells, self._filled_cells = self._section
        memo = self.memo.copy()
        first, _ = memo[id(mark)]
        for key in [key for key, (index, _) in memo.items() if index >= first]:
            del memo[key]
        self.memo = memo

    # ── pickle's hooks ───────────────────────────────────────────────────────────────────────────

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        kind = type(obj)
        handler = self.handlers.get(kind, _UNKNOWN)
        if handler is _UNKNOWN:  # the first object of its class
            own = self._reduce_named if self.says_how_to_pickle(kind) else None
            if is_main(kind) and is_made_by_library(kind):
                own = reduce_by_library
            handler = self.handlers[kind] = self.handler_of(kind) or own
        if handler is not None:
            return handler(obj)
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(obj)
        if not issubclass(kind, (type, types.FunctionType)):
            if stands_for_a_function(obj):
                return self._reduce_named(obj)
            return reduce_instance(obj, self.tracks_sharing)
        self._import_module_of(obj)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and issubclass(kind, type) and len(reduced) == 6:
            return self._reduce_class(obj, reduced)
        return reduced

    def _import_module_of(self, obj: Any) -> None:
        """Import the submodule that a class or function names, as pickle does: ``numpy.rec``.

        A package may have it as an attribute only. cloudpickle would send the class by value.
        """
        name = getattr(obj, "__module__", None)
        if not isinstance(name, str) or name in sys.modules or name in self._not_modules:
            return
        root, dot, _ = name.partition(".")
        self._not_modules.add(name)
        if dot and root in sys.modules:
            with suppress(Exception):  # the code of a module may raise anything
                importlib.import_module(name)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        if func.__globals__ is functools.__dict__ and hasattr(func, "registry"):
            return standard_library.reduce_single_dispatch(func)
        if is_of_class_method(func) and not self.is_replacement(func):
            return resolve, (func.__module__, f"{func.__qualname__}.__func__")
        home = self._home_of(func)
        for cell in func.__closure__ or ():
            self._bare_cells[id(cell)] = cell
        module = self.module_over(func.__globals__) if home is None else home
        if module is None:
            # cloudpickle gives each function variables of its own.
            make, args, (attributes, slots), _, _, set_state = super()._dynamic_function_reduce(
                functions.with_readable_annotations(func)
            )
            slots = {**slots, "__closure__": None}
            copied = set_state, (attributes, slots), self._cell_contents(func)
            args = *args[:-1], func.__closure__
            return make, args, copied, None, None, functions.restore_copied_function
        args = (func.__code__, module, func.__closure__, self.binding(func, func.__qualname__))
        state = {
            "attributes": dict(func.__dict__),
            "slots": self._function_slots(func),
            "cells": self._cell_contents(func),
            "globals": self.globals_for(func) if home == "__main__" else generated_imports(func),
        }
        return functions.restore_function, args, state, None, None, functions.restore_function_state

    def _function_slots(self, func: types.FunctionType) -> dict[str, Any]:
        names = ["__name__", "__qualname__", "__module__", "__doc__"]
        if sys.version_info >= (3, 12):
            names.append("__type_params__")
        defaults, keywords = func.__defaults__, func.__kwdefaults__
        return {
            "__defaults__": defaults and tuple(map(self.default_of, defaults)),
            "__kwdefaults__": keywords
            and {name: self.default_of(each) for name, each in keywords.items()},
            **{name: getattr(func, name) for name in names},
            "__annotations__": annotations_of(func),
        }

    def _home_of(self, func: types.FunctionType) -> str | None:
        """Return the module whose globals ``func`` uses in the reader, None for a copy."""
        if self.is_of_main(func):
            return "__main__" if self.main_by_value else None
        module = module_of(func)
        return None if module is None or module.__spec__ is None else module.__name__

    # ── other globals of __main__ ────────────────────────────────────────────────────────────────

    def says_how_to_pickle(self, kind: type) -> bool:
        """Whether a class of the notebook has a hook of pickle, which may return the name of a global."""
        if not is_main(kind) or kind in self.dispatch_table:
            return False
        hooks = (find_on_type(kind, name) for name in ("__reduce__", "__reduce_ex__"))
        return any(isinstance(hook, types.FunctionType) and is_main(hook) for hook in hooks)

    def _reduce_named(self, obj: Any) -> Any:
        """Reduce an object that may be pickled as a global, which the reader's ``__main__`` may lack."""
        name = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(name) is not str or is_importable(obj, name):
            return name
        return self._reduce_global(obj, name)

    def _reduce_global(self, obj: Any, name: str) -> Any:
        kind, binding = type(obj), self.binding(obj, name)
        if kind not in standard_library.PICKLED_BY_NAME:
            _, _, *parts = reduce_by_value(obj)
            return restore_global, (kind, binding, (), None), *parts
        return restore_global, (kind, binding, *standard_library.arguments_of(obj))

    # ── functions' variables ─────────────────────────────────────────────────────────────────────

    def _cell_contents(self, func: types.FunctionType) -> list[tuple[types.CellType, Any]]:
        contents = []
        for cell in func.__closure__ or ():
            if id(cell) not in self._filled_cells and not functions.is_empty(cell):
                self._filled_cells.add(id(cell))
                contents.append((cell, cell.cell_contents))
        return contents

    def _reduce_cell(self, cell: types.CellType) -> Any:
        # Cells of a function are created empty and filled with the function's state, since their
        # contents may refer to the function.
        return (functions.restore_cell, ()) if id(cell) in self._bare_cells else NotImplemented

    def _reduce_code(self, code: types.CodeType) -> Any:
        # Since 3.1.3 cloudpickle replaces the name of the file, by which tracebacks find their lines.
        _, args = self.dispatch_table[types.CodeType](code)
        return functions.restore_code, (args, code.co_filename)

    # ── classes and modules ──────────────────────────────────────────────────────────────────────

    def _reduce_class(self, cls: type, reduced: Any) -> Any:
        if (place := exported_as(cls)) is not None:
            return resolve, place
        make, args, state, _, _, set_state = reduced
        *head, tracker, extra = args
        if len(head) == classes.SKELETON_CLASS_ARGS:
            head[3].update(classes.layout_of(cls))
        elif issubclass(cls, enum.Enum):
            # cloudpickle makes aliases plain attributes.
            head[3] = {name: member.value for name, member in cls.__members__.items()}
            for name in head[3]:
                state[0].pop(name, None)
            track = cloudpickle.cloudpickle._lookup_class_or_track
            make, head = classes.make_enum, [track, type(cls), *head]
        state = classes.attributes_of(cls, state[0]), state[1]
        if self.tracks_classes:
            classes.complete_classes.add(cls)
        tracker = tracker if self.tracks_classes else None
        binding, registrations = self.binding(cls, cls.__qualname__), self.registrations(cls)
        new_args = (make, (*head, tracker, extra), binding, registrations.know_fields)
        others = self.companions(cls), classes.member_attributes(cls), registrations.calls
        new_state = (set_state, state, *others)
        return (
            classes.restore_class,
            new_args,
            new_state,
            None,
            None,
            classes.restore_class_state,
        )

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if (name := importable_name(module)) is not None:
            return importlib.import_module, (name,)
        attributes = object.__getattribute__(module, "__dict__")
        self._modules[id(attributes)] = module
        state = {name: value for name, value in attributes.items() if name != "__builtins__"}
        make = functions.restore_module, (str(attributes.get("__name__")),)
        return (*make, state, None, None, functions.restore_module_state)

    def _reduce_shared_refs(self, shared: pandas_frames.SharedRefs) -> Any:
        refs = shared.refs if self.tracks_sharing else None
        return restore_same, (refs,)  # one object for all frames that share it

    # ── arrays and tensors ───────────────────────────────────────────────────────────────────────

    def _add_numpy_handlers(self) -> None:
        numpy: Any = sys.modules.get("numpy")
        if hasattr(numpy, "ndarray") and hasattr(numpy, "memmap"):
            self.handlers[numpy.ndarray] = self._reduce_array
            self.handlers[numpy.memmap] = self._reduce_memmap

    def _reduce_array(self, array: Any) -> Any:
        flags = array.flags
        if flags.writeable or (flags.forc and not array.dtype.hasobject):
            return NotImplemented
        # NumPy copies the elements of an array with gaps or of objects, and forgets that it is read-only.
        return numpy_arrays.restore_read_only, (array.copy(),)

    def _reduce_memmap(self, array: Any) -> Any:
        # NumPy copies the contents of subclasses into the stream; a plain array goes out of band.
        plain = array.view(sys.modules["numpy"].ndarray)
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    def _add_storage_handlers(self) -> None:
        torch = sys.modules.get("torch")
        storage = getattr(torch, "storage", None)
        if hasattr(torch, "UntypedStorage") and hasattr(storage, "TypedStorage"):
            self.handlers[torch.UntypedStorage] = self._reduce_storage  # type: ignore[union-attr]
            self.handlers[storage.TypedStorage] = self._reduce_typed_storage  # type: ignore[union-attr]
            self._rebuild_tensor = getattr(torch._utils, "_rebuild_tensor_v3", None)  # type: ignore[union-attr]

    def _function_reduce(self, func: types.FunctionType) -> Any:
        # Of unsigned and 8-bit floating types; it relies on a quirk of torch's own storage pickles.
        if func is self._rebuild_tensor:
            return resolve, (tensor_storages.__name__, tensor_storages.restore_tensor.__name__)
        # ``functools.wraps`` gives a function the names of another one, whose place it may have.
        is_wrapper = self.is_of_main(func) and func.__module__ != func.__globals__.get("__name__")
        if is_wrapper or self.is_replacement(func):
            return self._dynamic_function_reduce(func)
        return super()._function_reduce(func)

    def _reduce_cached_function(self, obj: Any) -> Any:
        is_named = not is_main(obj) and is_importable(obj, obj.__qualname__)
        if is_named and not self.is_replacement(obj):
            return NotImplemented
        return standard_library.reduce_cached_function(obj)

    def _reduce_typed_storage(self, storage: Any) -> Any:
        untyped = storage._untyped_storage
        # Every access makes a new Python object for the same memory: pickle must see only one.
        one = self._storages.setdefault(untyped._cdata, untyped)
        return tensor_storages.restore_typed_storage, (one, storage.dtype)

    def _reduce_storage(self, storage: Any) -> Any:
        one = self._storages.setdefault(storage._cdata, storage)
        if one is not storage:
            return restore_same, (one,)
        device = storage.device.type
        if device not in ("cpu", "cuda"):
            return NotImplemented
        travels_as = self.cuda_travels_as if device == "cuda" else "cpu"
        return tensor_storages.restore_storage, (*self._memory_of(storage.cpu()), travels_as)

    def _memory_of(self, storage: Any) -> tuple[Any, int, int]:
        """Return the buffer with the contents of a storage, their start in it, and their size."""
        nbytes = storage.nbytes()
        if nbytes == 0:
            return b"", 0, 0
        address = storage.data_ptr()
        memory = self.layout.add(address, address + nbytes, storage)
        return memory, address - memory.origin, nbytes
