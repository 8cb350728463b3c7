"""Pickles the notebook's objects: those of ``__main__`` by value, all others by name."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from typing import Any

from hydrogen_magic.capture.needs import Needs
from hydrogen_magic.capture.reach import code_objects, imported_names
from hydrogen_magic.serialization.identity import Originals, numbered, restore_numbered
from hydrogen_magic.serialization.pickler import Pickler, global_names, is_main
from hydrogen_magic.serialization.pickling_errors import RefusedError
from hydrogen_magic.serialization.reducers import UNBOUND, Binding, resolve

__all__ = ["CapturePickler"]

_FILES: tuple[type, ...] = (
    io.TextIOWrapper,
    io.BufferedReader,
    io.BufferedWriter,
    io.BufferedRandom,
    io.FileIO,
)

_SPARK_CLASSES = (
    ("pyspark.core.context", "SparkContext"),
    ("pyspark.context", "SparkContext"),
    ("pyspark.sql.session", "SparkSession"),
    ("pyspark.sql.classic.dataframe", "DataFrame"),
    ("pyspark.sql.dataframe", "DataFrame"),
    ("pyspark.sql.connect.session", "SparkSession"),
    ("pyspark.sql.connect.dataframe", "DataFrame"),
    ("pyspark.core.rdd", "RDD"),
)


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
        needs: Needs,
        ranks_have_gpu: bool,
        is_local: Callable[[str], bool],
    ) -> None:
        super().__init__(file, protocol, buffer_callback)
        self.cuda_travels_as = "cuda" if ranks_have_gpu else "cpu"
        self.modules: set[str] = set()
        """Modules that the stream refers to by name."""
        self.filenames: set[str] = set()
        """Source files of functions that are sent by value."""
        self.attributes: set[str] = set()
        """Names that those functions use, including attributes."""
        self.needs = needs
        self.originals: Originals | None = None
        """Numbers of objects in the current value, if the value is to be brought back."""
        self._is_local = is_local
        self.handlers[type(sys.stdout)] = self._reduce_stream
        for kind in _FILES:
            self.handlers.setdefault(kind, self._reduce_file)
        self._refuse_spark()
        if not ranks_have_gpu:
            self._refuse_cuda()

    def reducer_override(self, obj: Any) -> Any:
        number = None if self.originals is None else self.originals.number(obj)
        reduced = self._reduce(obj)
        return reduced if number is None else numbered(restore_numbered, number, obj, reduced)

    def _reduce(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and issubclass(type(obj), _NAMED):
            return self._by_name(obj)
        return reduced

    def _by_name(self, obj: Any) -> Any:
        module = getattr(obj, "__module__", None)
        if isinstance(module, str):
            self.modules.add(module)
        return NotImplemented

    def _reduce_module(self, module: types.ModuleType) -> Any:
        reduced = super()._reduce_module(module)
        if reduced is not NotImplemented:
            self.modules.add(reduced[1][0])
        return reduced

    def _reduce_class(self, cls: type, reduced: Any) -> Any:
        module, name = cls.__module__, cls.__qualname__
        if not is_main(cls) and self._is_local(module) and isinstance(_find(module, name), type):
            # The kernel has reloaded the module since: ranks use its current state anyway.
            self.modules.add(module)
            return resolve, (module, name)
        return super()._reduce_class(cls, reduced)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        home = self._home_of(func)
        if home == "__main__":
            self.filenames.add(func.__code__.co_filename)
            self.attributes.update(*(code.co_names for code in code_objects(func.__code__)))
            self.modules.update(imported_names(func.__code__))
        elif home is not None:
            self.modules.add(home)
        return super()._dynamic_function_reduce(func)

    def globals_for(self, function: types.FunctionType) -> dict[str, Any]:
        """Return names that the notebook's functions read and that the analysis did not find.

        These functions are inside of objects (an instance's class, a callback in a dict): the names are
        sent with them, because unpickling those objects may call the functions.
        """
        found: dict[str, Any] = {}
        if all(self.needs.is_known(name) for name in global_names(function.__code__)):
            return found
        known = set(self.needs.values)
        self.needs.add_reads(function)
        for name in set(self.needs.values) - known:
            found[name] = self.needs.namespace[name]
        return found

    def companions(self, cls: type) -> dict[str, Any]:
        """Return the notebook's class that contains ``cls``: plain pickle looks for it there."""
        outer, dot, _ = cls.__qualname__.partition(".")
        if not dot or not is_main(cls) or _find("__main__", cls.__qualname__) is not cls:
            return {}
        self.needs.add(outer, f"{cls.__qualname__} is nested in it")
        return {outer: self.needs.namespace[outer]} if outer in self.needs.namespace else {}

    def binding(self, obj: Any) -> Binding:
        name = obj.__qualname__
        if not is_main(obj) or not name.isidentifier():
            return UNBOUND
        mine = self.needs.namespace.get(name, UNBOUND)
        if mine is obj:
            return Binding(name, True)
        return Binding(name, False) if mine is UNBOUND else UNBOUND

    # ── objects that pickle would accept, but should not ────────────────────────────────────────

    def _reduce_stream(self, stream: Any) -> Any:
        for name in ("stdout", "stderr"):
            if stream is getattr(sys, name) or stream is getattr(sys, f"__{name}__"):
                return getattr, (sys, name)
        return self._reduce_file(stream) if isinstance(stream, _FILES) else NotImplemented

    def _reduce_file(self, file: Any) -> Any:
        if file in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            return self._reduce_stream(file)
        name = getattr(file, "name", None)
        raise RefusedError(file, f"it is an open file ({name!r})", "open it inside the cell")

    def _refuse_spark(self) -> None:
        for module, name in _SPARK_CLASSES:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type):
                self.handlers[kind] = _refuse_spark_object

    def _refuse_cuda(self) -> None:
        torch = sys.modules.get("torch")
        kinds = [getattr(torch, "Tensor", None)]
        kinds.append(getattr(getattr(torch, "nn", None), "Parameter", None))
        for kind in kinds:
            if isinstance(kind, type):
                self.handlers[kind] = _refuse_cuda_tensor


_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)


def _refuse_spark_object(obj: Any) -> Any:
    kind = type(obj).__name__
    remedy = "use Spark in the notebook and send only the data that the ranks need"
    if kind in ("DataFrame", "RDD"):
        remedy = "send its data (.toPandas(), .collect()), or use %%infer"
    raise RefusedError(obj, f"a {kind} exists only in the notebook's process", remedy)


def _refuse_cuda_tensor(tensor: Any) -> Any:
    if tensor.is_cuda:
        why = "it is a CUDA tensor and the ranks have no GPU"
        raise RefusedError(tensor, why, "use .cpu() on it first, or run with --gpu")
    return NotImplemented


def _find(module: str, qualname: str) -> Any:
    try:
        return resolve(module, qualname)
    except (ImportError, AttributeError):
        return None
