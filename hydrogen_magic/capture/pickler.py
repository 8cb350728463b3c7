"""Pickles the notebook's objects: those of ``__main__`` by value, all others by name."""

from __future__ import annotations

import builtins
import importlib
import io
import operator
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from hydrogen_magic.capture.class_statements import (
    ClassStatement,
    defaults_of,
    hook_with_keyword,
    statement_of,
)
from hydrogen_magic.capture.module_objects import ModuleObject, constants_of
from hydrogen_magic.capture.reachable import is_notebooks
from hydrogen_magic.capture.redefined import name_of_earlier, present_one
from hydrogen_magic.capture.registrations import registrations_of
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.core.library_types import derives_from, loaded
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.serialization.bindings import UNBOUND, Binding
from hydrogen_magic.serialization.class_statements import (
    BASES,
    METACLASS,
    restore_class_by_statement,
    restore_later_state,
)
from hydrogen_magic.serialization.classes import Registrations, restore_class
from hydrogen_magic.serialization.code_names import code_objects, global_names, imported_names
from hydrogen_magic.serialization.identity import (
    ObjectIdentity,
    Originals,
    is_array,
    numbered,
)
from hydrogen_magic.serialization.importable import (
    exported_as,
    find,
    is_main,
    resolve,
    restore_module_object,
    restore_sentinel,
)
from hydrogen_magic.serialization.instances import (
    Reduced,
    attributes_alone,
    reduce_instance,
    restore_same,
)
from hydrogen_magic.serialization.library_objects.jax_arrays import (
    is_jax_array,
    restore_stand_in,
    values_of_jax_array,
)
from hydrogen_magic.serialization.library_objects.numpy_arrays import restore_array
from hydrogen_magic.serialization.library_objects.pandas_frames import (
    SharedRefs,
    copies_on_write,
    reduce_block,
    reduce_index,
    reduce_single_manager,
)
from hydrogen_magic.serialization.library_objects.tensor_hooks import reduce_tensor, with_hooks
from hydrogen_magic.serialization.memory_layout import MemoryLayout, extent_of
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.serialization.pickling_errors import RefusedError, refuse

_SPARSE = 2
"""Memory this many times as large as the part in use is not sent whole."""
_SMALL_BYTES = 4096
"""A storage of this size is sent whole."""

_SPARK_CLASSES = (
    ("pyspark.core.context", "SparkContext"),
    ("pyspark.sql.session", "SparkSession"),
    ("pyspark.sql.classic.dataframe", "DataFrame"),
    ("pyspark.sql.connect.session", "SparkSession"),
    ("pyspark.sql.connect.dataframe", "DataFrame"),
    ("pyspark.core.rdd", "RDD"),
)
_SPARK_DATA = "send its data (.toPandas(), .collect()), or use %%infer"
_SPARK_REMEDIES = {
    "DataFrame": f"use hm.dataset(df), which ranks read with hm.shard(); or {_SPARK_DATA}",
    "RDD": _SPARK_DATA,
}

_FILES = (
    io.TextIOWrapper,
    io.BufferedReader,
    io.BufferedWriter,
    io.BufferedRandom,
    io.FileIO,
)
"""A subclass may say how its files are pickled."""

_REFUSED = (
    (
        ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
        "an iterator of a DataLoader belongs to the process that created it",
        "send the DataLoader, and call iter() inside the cell",
    ),
    (
        ("tqdm.std", "tqdm"),
        "a progress bar is tied to the output of its own process",
        "create the bar inside the cell",
    ),
)
"""Classes with their subclasses, why their objects are not sent, and the remedy."""


class CapturePickler(Pickler):
    """Pickles values of the notebook for ranks, whose ``__main__`` becomes the notebook."""

    main_by_value = True
    tracks_classes = False

    def __init__(
        self,
        file: Any,
        protocol: int,
        buffer_callback: Callable[[Any], Any],
        *,
        needs: RequiredNames,
        ranks_have_gpu: bool,
        layout: MemoryLayout | None = None,
        originals: Originals | None = None,
    ) -> None:
        """``originals``: those of a session; their definitions follow the present ones."""
        super().__init__(file, protocol, buffer_callback)
        self._originals = Originals() if originals is None else originals
        self.layout = layout or MemoryLayout()
        self._parts: dict[tuple[int, int, int], Any] = {}
        """Parts of torch storages, by storage and range."""
        self.cuda_travels_as = "cuda" if ranks_have_gpu else "cpu"
        self.modules: set[str] = set()
        """Modules that the stream refers to by name."""
        self.filenames: set[str] = set()
        """Source files of functions that are sent by value."""
        self.n_process_states = 0
        """How many objects hold what Accelerate knows of the notebook's process."""
        self.n_jax_arrays = 0
        """How many arrays of JAX are NumPy arrays on the ranks."""
        self.attributes: set[str] = set()
        """Names that those functions use, including attributes."""
        self.needs = needs
        self.number_of: Callable[[Any], int | None] | None = None
        """Returns the numbers of objects in the current value, if results may update some of them."""
        self._statements: dict[type, ClassStatement | None] = {}
        """By the class that they make."""
        self._begun: dict[int, list[list[str]]] = {}
        """By the ``id`` of a class that its statement makes: for each time that it was begun, its name if it
        was begun again, since what the statement reads contains the class."""
        self._block_depth = 0
        """How many of pandas' blocks and indices are being written."""
        self.code_on_ranks: frozenset[str] = frozenset()
        """Names of functions and classes that the ranks have already."""
        self.value_on_ranks: Callable[[Any], str | None] | None = None
        """Returns the name under which the ranks have an object with the same contents."""
        self.datasets: dict[str, str] = {}
        """Data of ``hm.dataset`` that only this machine has: its name -> its folder."""
        self.data_places: set[str] = set()
        """Paths and URLs of all data of ``hm.dataset``."""
        self._ranks_have_gpu = ranks_have_gpu
        self._add_handlers()

    def _add_handlers(self) -> None:
        self.handlers[type(sys.stdout)] = self._reduce_stream
        self.handlers |= dict.fromkeys(_FILES, self._reduce_file)
        self.handlers[DatasetHandle] = self._reduce_dataset
        for module, name in _SPARK_CLASSES:
            self._handle(module, name, _refuse_spark_object)
        for name in ("PartialState", "AcceleratorState"):
            self._handle("accelerate.state", name, self._reduce_process_state)
        for place in (("torch", "Tensor"), ("torch.nn", "Parameter")):
            self._handle(*place, self._reduce_tensor)

    def _reduce_process_state(self, state: Any) -> Any:
        self.n_process_states += 1
        return reduce_instance(state, self.tracks_sharing)

    def _reduce_dataset(self, handle: DatasetHandle) -> Any:
        if handle.name:
            self.datasets[handle.name] = str(handle.path)
        self.data_places.update([handle.path] if isinstance(handle.path, str) else handle.path)
        return handle.__reduce__()

    def dump_objects(self, objects: Sequence[ModuleObject]) -> None:
        """Write the places of objects of modules: values that are written later refer to them."""
        places = [
            Reduced((restore_module_object, (each.module, each.name, type(each.value))))
            for each in objects
        ]
        self.dump(places)
        memo = self.memo.copy()
        for place, each in zip(places, objects, strict=True):
            index, _ = memo.pop(id(place))
            memo[id(each.value)] = index, each.value
        self.memo = memo
        self.modules.update(each.module for each in objects)

    def is_of_main(self, func: types.FunctionType) -> bool:
        return is_notebooks(func, self.needs.namespace)

    def reducer_override(self, obj: Any) -> Any:
        number = self._number(obj)
        if number is None and (name := self._name_on_ranks(obj)) is not None:
            return resolve, ("__main__", name)
        reduced = self._reduce(obj)
        return reduced if number is None else numbered(number, obj, reduced)

    def _name_on_ranks(self, obj: Any) -> str | None:
        if self.value_on_ranks is None or self.number_of is None:
            return None  # the arguments of a call are copies
        return self.value_on_ranks(obj)

    def _number(self, obj: Any) -> int | None:
        if self.number_of is None:
            return None
        if self._block_depth and is_array(obj) and copies_on_write():
            return None  # other frames over this memory must not see what is brought back
        return self.number_of(obj)

    def _reduce(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and issubclass(type(obj), _NAMED):
            module = getattr(obj, "__module__", None)
            if module == "__mp_main__":
                _refuse_definition_of_child(obj)
            if isinstance(module, str):
                self.modules.add(module)
        return reduced

    def _reduce_module(self, module: types.ModuleType) -> Any:
        reduced = super()._reduce_module(module)
        if reduced[0] is importlib.import_module:
            self.modules.add(reduced[1][0])
        return reduced

    def module_over(self, names: dict[str, Any]) -> types.ModuleType | None:
        if (known := super().module_over(names)) is not None:
            return known
        sent = (self.needs.namespace.get(name) for name in self.needs.values)
        modules = (value for value in sent if issubclass(type(value), types.ModuleType))
        return next(
            (one for one in modules if object.__getattribute__(one, "__dict__") is names), None
        )

    def _reduce_class(self, cls: type, reduced: Any) -> Any:
        module, name = cls.__module__, cls.__qualname__
        if (
            isinstance(module, str)
            and not is_main(cls)
            and self.needs.local.is_local(module)
            and _is_reloaded(cls)
        ):
            # The kernel has reloaded the module since: ranks use its current state anyway.
            self.modules.add(module)
            return resolve, (module, name)
        if (place := exported_as(cls)) is not None:
            self.modules.add(place[0])
        known = self._on_ranks(cls) or self._in_made_class(cls) or self._by_statement(cls, reduced)
        return known or self._by_attributes(cls, reduced)

    def _by_attributes(self, cls: type, reduced: Any) -> Any:
        """Reduce a class that ranks make of its attributes."""
        found = super()._reduce_class(cls, reduced)
        if found[0] is restore_class and (hook := hook_with_keyword(cls)):
            why = f"{hook} requires a keyword, and no class statement was found that ranks can execute again"
            raise RefusedError(cls, why, "define the class in a local module")
        return found

    def _by_statement(self, cls: type, reduced: Any) -> Any:
        """Reduce a class that ranks make by its statement; None for others."""
        statement = self._statement_of(cls)
        if statement is None:
            return None
        begun, contains_itself = self._begun.setdefault(id(cls), []), list[str]()
        for earlier in begun:
            earlier.append(statement.name)
        if len(begun) > len(statement.names):  # each time, one of them is known to the stream
            return None
        begun.append(contains_itself)
        self._add_code(statement.code)
        if self.needs.namespace.get(statement.name) is cls:  # a rank has it by then
            self.needs.ignore(statement.name)
        _, (kind, _, bases, *_), (attributes, _), *_, set_state = reduced
        given = {BASES: bases, METACLASS: kind}
        made = statement.code, statement.name, given, dict(statement.names)
        binding = self.binding(cls, cls.__qualname__)
        kept = statement.kept(cls, attributes, self.needs)
        return (
            restore_class_by_statement,
            (*made, binding, contains_itself),
            (set_state, kept, self._names_of(statement), defaults_of(attributes)),
            None,
            None,
            restore_later_state,
        )

    def _names_of(self, statement: ClassStatement) -> dict[str, Any]:
        """Return the notebook's names that the methods of a class read, and those in its texts."""
        names, n_known = {*statement.mentioned}, len(self.needs.values)
        for code in statement.functions():
            cells = tuple(types.CellType() for _ in code.co_freevars)
            space = cast(dict[str, Any], self.needs.namespace)
            names |= {*self.globals_for(types.FunctionType(code, space, None, None, cells))}
        for name in statement.mentioned:
            self.needs.add(name, f"named in {statement.name}")
        names |= {*list(self.needs.values)[n_known:]}
        return {name: self.needs.namespace[name] for name in sorted(names)}

    def _in_made_class(self, obj: Any) -> Any:
        """Reduce a part of a class that ranks make by its statement; None for others."""
        outer, dot, path = obj.__qualname__.partition(".")
        owner = self.needs.namespace.get(outer)
        if not dot or not is_main(obj) or not isinstance(owner, type):
            return None
        if find("__main__", obj.__qualname__) is not obj or self._statement_of(owner) is None:
            return None
        return operator.attrgetter(path), (owner,)

    def _statement_of(self, cls: type) -> ClassStatement | None:
        if cls not in self._statements:
            self._statements[cls] = statement_of(cls, self.needs)
        return self._statements[cls]

    def _on_ranks(self, obj: Any) -> Any:
        """Reduce a function or class that the ranks have; None for others."""
        name = self._notebook_name(obj) or self._name_of_ranks(obj)
        if name in self.code_on_ranks:
            return resolve, ("__main__", obj.__qualname__)
        present = present_one(obj, self.needs.namespace, self._originals)
        return None if present is None else (restore_same, (present,))

    def _notebook_name(self, obj: Any) -> str | None:
        """Return the name under which the notebook has a function or class, or the class around it."""
        if not isinstance(obj, type) or is_main(obj):
            return notebook_name(obj, self.needs.namespace)
        statement = self._statement_of(obj)
        return statement.name if statement else None

    def _name_of_ranks(self, obj: Any) -> str | None:
        """Return the name of a definition that the ranks have, and the notebook has not or has deleted."""
        name, namespace = str(obj.__qualname__).partition(".")[0], self.needs.namespace
        if name in namespace:
            return None
        if self.number_of is not None and ObjectIdentity(obj) in self._originals.of_ranks:
            return name
        return name_of_earlier(obj, namespace, self._originals)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        if (there := self._on_ranks(func)) is not None:
            return there
        if (part := self._in_made_class(func)) is not None:
            return part
        home = self._home_of(func)
        if home in (None, "__main__"):
            self._add_code(func.__code__)
        else:
            self.modules.add(str(home))
        return super()._dynamic_function_reduce(func)

    def _add_code(self, code: types.CodeType) -> None:
        self.filenames.add(code.co_filename)
        for each in code_objects(code):
            self.attributes.update(each.co_names)
        self.modules.update(imported_names(code))

    def default_of(self, value: Any) -> Any:
        name = self._name_on_ranks(value)  # pickle asks about no list or dict
        return value if name is None else Reduced((resolve, ("__main__", name)))

    def globals_for(self, function: types.FunctionType) -> dict[str, Any]:
        """Return names that the notebook's functions read and that the analysis did not find.

        These functions are inside of objects (an instance's class, a callback in a dict): the names are
        sent with them, because unpickling those objects may call the functions.
        """
        names = global_names(function.__code__)
        if all(self.needs.is_known(name) for name in names):
            possible = [name for name in names if name in self.needs.assigned]
            possible = [name for name in possible if name in self.needs.namespace]
            self.needs.possible.update(
                dict.fromkeys(possible, f"used by {function.__qualname__}()")
            )
            return {}
        n_known = len(self.needs.values)
        self.needs.add_reads(function)
        return {name: self.needs.namespace[name] for name in list(self.needs.values)[n_known:]}

    def companions(self, cls: type) -> dict[str, Any]:
        """Return the notebook's class that contains ``cls``: plain pickle looks for it there."""
        outer, dot, _ = cls.__qualname__.partition(".")
        if not dot or not is_main(cls) or find("__main__", cls.__qualname__) is not cls:
            return {}
        self.needs.add(outer, f"{cls.__qualname__} is nested in it")
        return {outer: self.needs.namespace[outer]} if outer in self.needs.namespace else {}

    def is_replacement(self, func: Any) -> bool:
        return (func.__module__, func.__qualname__) in self.needs.replaced()

    def registrations(self, cls: type) -> Registrations:
        return registrations_of(cls)

    def binding(self, obj: Any, name: str) -> Binding:
        mine = self.needs.namespace.get(name, UNBOUND)
        if mine is obj and is_main(obj):
            return Binding(name, True)
        if isinstance(obj, type) and (other := self._name_of(obj)):
            return Binding(other, True)
        # A builtin's name means the builtin again once the notebook has deleted its own.
        if not is_main(obj) or not name.isidentifier() or hasattr(builtins, name):
            return UNBOUND
        return Binding(name, False) if mine is UNBOUND else UNBOUND

    def _name_of(self, cls: type) -> str:
        """Return the notebook's name for a class with another one: ``Pair = namedtuple("P", "x y")``."""
        names = (name for name, value in self.needs.namespace.items() if value is cls)
        return next((name for name in names if not name.startswith("_")), "")

    # ── objects that pickle would accept, but should not ────────────────────────────────────────

    def _reduce_stream(self, stream: Any) -> Any:
        for name in ("stdout", "stderr"):
            if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
        handler = self.handler_of(type(stream))
        return NotImplemented if handler is None else handler(stream)

    def _reduce_file(self, file: Any) -> Any:
        if file in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            return self._reduce_stream(file)
        name, state = getattr(file, "name", None), "a closed" if file.closed else "an open"
        raise RefusedError(file, f"it is {state} file ({name!r})", "open it inside the cell")

    def handler_of(self, kind: type) -> Callable[[Any], Any] | None:
        for (module, name), why, remedy in _REFUSED:
            if derives_from(kind, module, name):
                return partial(refuse, why=why, remedy=remedy)
        if is_jax_array(kind):
            return self._reduce_jax_array
        handler = super().handler_of(kind)
        if handler is None:
            return self._handler_of_constants(kind)
        return partial(self._reduce_block, handler) if handler in _OVER_BLOCKS else handler

    def _handler_of_constants(self, kind: type) -> Callable[[Any], Any] | None:
        """Return what reduces objects of a class of which a module has a constant."""
        if is_main(kind) or not (places := constants_of(kind)):
            return None
        return partial(self._reduce_constant, places)

    def _reduce_constant(self, places: Mapping[int, tuple[str, str]], obj: Any) -> Any:
        place = places.get(id(obj))
        if place is None or find(*place) is not obj:
            return reduce_instance(obj, self.tracks_sharing)
        self.modules.add(place[0])
        is_sentinel = attributes_alone(obj) is not None
        return (restore_sentinel, (*place, type(obj))) if is_sentinel else (resolve, place)

    def _reduce_jax_array(self, array: Any) -> Any:
        """Reduce to a read-only NumPy array: making a jax.Array would start JAX's backend on the rank, and
        then ``jax.distributed.initialize()`` is refused there.
        """
        self.n_jax_arrays += 1
        return restore_stand_in, (values_of_jax_array(array),)

    def _handle(self, module: str, name: str, handler: Callable[[Any], Any]) -> None:
        """Reduce the objects of a class with ``handler`` if its module is imported."""
        kind = loaded(module, name)
        if isinstance(kind, type):
            self.handlers[kind] = handler

    def _reduce_block(self, handler: Callable[[Any], Any], obj: Any) -> Any:
        self._block_depth += 1
        return handler(obj)

    def _reduce_shared_refs(self, shared: SharedRefs) -> Any:
        self._block_depth -= 1  # they are written after the memory
        return super()._reduce_shared_refs(shared)

    # ── memory that arrays and tensors share ─────────────────────────────────────────────────────

    def _reduce_array(self, array: Any) -> Any:
        if array.nbytes == 0 or array.dtype.hasobject:
            return super()._reduce_array(array)
        (start, end), flags = extent_of(array), array.flags
        # NumPy sends a contiguous array without a copy, and copies the elements of one with gaps alone.
        is_numpys = (flags.forc and flags.writeable) or end - start > _SPARSE * array.nbytes
        memory = self.layout.add(start, end, array, can_be_alone=is_numpys)
        if memory.is_alone:
            return super()._reduce_array(array)
        offset = array.__array_interface__["data"][0] - memory.origin
        layout = array.shape, array.strides, array.dtype, flags.writeable
        return restore_array, (memory, offset, *layout)

    def _reduce_memmap(self, array: Any) -> Any:
        plain = array.view(sys.modules["numpy"].ndarray)
        reduced = self._reduce_array(plain)
        return (
            plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduced is NotImplemented else reduced
        )

    def _reduce_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor with its hooks, to the part of its storage that it uses if that is smaller."""
        if tensor.is_cuda and not self._ranks_have_gpu:
            why = "it is a CUDA tensor and the ranks have no GPU"
            raise RefusedError(tensor, why, "use .cpu() on it first, or run with --gpu")
        return with_hooks(tensor, self._reduce_to_part(tensor))

    def _reduce_to_part(self, tensor: Any) -> Any:
        """Reduce a tensor to the part of its storage that it uses, if that is much smaller."""
        torch = sys.modules["torch"]
        is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        if type(tensor) is not torch.Tensor or not is_plain or tensor.numel() == 0:
            return NotImplemented
        part = self._part_of_storage(tensor)
        if part is None:
            return NotImplemented
        storage, offset, strides = part
        make, args = reduce_tensor(tensor)
        if make not in (torch._utils._rebuild_tensor_v2, self._rebuild_tensor):
            return NotImplemented
        if dtype := getattr(args[0], "dtype", None):
            storage = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return make, (storage, offset, args[2], strides, *args[4:])

    def _part_of_storage(self, tensor: Any) -> tuple[Any, int, tuple[int, ...]] | None:
        """Return the storage to send, the tensor's offset and strides in it; None for its own."""
        storage, size = tensor.untyped_storage(), tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        first = tensor.storage_offset() * size
        last = first + (1 + sum((n - 1) * step for n, step in steps)) * size
        total, address = storage.nbytes(), storage.data_ptr()
        used = min(last - first, tensor.numel() * size)
        if total <= max(_SPARSE * used, _SMALL_BYTES):
            return None
        has_gaps = last - first > _SPARSE * used
        memory = self.layout.add(address + first, address + last, tensor, can_be_alone=has_gaps)
        if memory.is_alone:
            copy = tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)
            return copy.untyped_storage(), 0, copy.stride()
        start, end = max(memory.start - address, 0), min(memory.end - address, total)
        if (start, end) == (0, total) or start % size:
            return None
        part = self._parts.setdefault((storage._cdata, start, end), storage[start:end])
        return part, (first - start) // size, tensor.stride()


_OVER_BLOCKS: tuple[Any, ...] = (reduce_block, reduce_single_manager, reduce_index)
"""What reduces objects of pandas that end with their :class:`SharedRefs`."""

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


def notebook_name(obj: Any, namespace: Mapping[str, Any]) -> str | None:
    """Return the name under which the notebook has a function or class, or the class around it."""
    if not is_main(obj):
        return None
    root, *parts = obj.__qualname__.split(".")
    found = namespace.get(root)
    for part in parts:
        found = getattr(found, part, None)
    return root if found is obj else None


def _is_reloaded(cls: type) -> bool:
    """Whether its module has been loaded again, and not another file under the same name."""
    module = sys.modules.get(cls.__module__)
    if module is None or not isinstance(find(cls.__module__, cls.__qualname__), type):
        return False
    functions = (one for one in vars(cls).values() if type(one) is types.FunctionType)
    names = {one.__code__.co_filename for one in functions if one.__module__ == cls.__module__}
    files = {name for name in names if not name.startswith("<")}  # not those of a dataclass
    return not files or getattr(module, "__file__", None) in files


def _refuse_spark_object(obj: Any) -> Any:
    kind = type(obj).__name__
    remedy = _SPARK_REMEDIES.get(
        kind, "use Spark in the notebook and send only the data that the ranks need"
    )
    raise RefusedError(obj, f"a {kind} exists only in the notebook's process", remedy)


def _refuse_definition_of_child(obj: Any) -> None:
    """Refuse what multiprocessing has run the main script again for: ranks do not have that module."""
    name = obj.__qualname__
    raise RefusedError(
        obj,
        f"{name} is defined in the main script, which is not `__main__` in this process of multiprocessing",
        f"define {name} in a module and import it, or call hm.run in the main process",
    )
