"""The code of ``%%infer`` in a Python worker of Spark: loads the package, and unloads it again.

Only the source of this file is sent with the task, so it uses only the standard library and
packages that Spark itself needs. A Python worker runs one task after another, of any job. So
everything of a cell (this package, its ``__main__``, its local modules, its environment) is loaded
while one of our tasks runs and unloaded at its end. Only one entry of ``sys.modules`` remains,
:data:`_KEPT`, with the models: the cell runs once in each worker process, which Spark ends after a
minute without work.
"""

from __future__ import annotations

import contextlib
import decimal
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import os
import sys
import time
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

END = "─" * 60
"""Last line of our own text in the message of the exception that ends the job."""
NOT_SHARED = "the executors and this notebook share no disk"
CHANGED = "have changed since they were predicted"
FOREIGN = "this function belongs to another Spark session: call hm.udf again in this one"
_KEPT = "_hydrogen_magic_infer"
_MOST_GUESTS = 2
"""Cells whose models one worker keeps: a frame may depend on two of them, in turn."""
_NUMPY_BEGINS_WITH = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""What NumPy does with errors (``numpy.geterr``)."""
_VECTOR = ["type", "size", "indices", "values"]
"""Parts of a vector of Spark ML; the type of a dense one is 1, of a sparse one 0."""
_ROOT = "/hydrogen_magic.zip"
"""Prefix of the package's paths in tracebacks; there is no such file."""


class InferError(Exception):
    """Ends the job."""

    # Spark prints the class before the message; its module would only distract.
    __module__ = "builtins"


def serve(batches: Any, config: dict[str, Any], package: Any, closure: Any) -> Any:
    """Yield the results for ``batches``. ``config``: the kernel's instructions.

    ``package`` and ``closure``: a broadcast variable, or the name of a file that Spark distributes.
    """
    yield from _explained(_served(_named(batches, config["names"]), config, package, closure))


def _explained(results: Iterator[Any]) -> Iterator[Any]:
    """Yield ``results``; raise an exception that Spark shows as it is."""
    try:
        yield from results
    except Exception as error:
        text = str(error) if isinstance(error, InferError) else f"{type(error).__name__}: {error}"
        # The worker prints the exception and exits; without this, below twenty frames of Spark.
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise InferError(f"{text}\n{END}") from None


def serve_arrays(arrays: Any, config: dict[str, Any], package: Any, closure: Any) -> Any:
    """Yield the predictions for the arguments of an Arrow UDF, one array or a tuple of them for a batch.

    If ``config["of_structs"]``, one array of structs has all columns. If ``config["is_column"]``, the
    predictions are the values of the only predicted column; otherwise they are structs.
    """
    of_structs, names = config["of_structs"], config["names"]
    batches = (_batch(each, names) if of_structs else _of_columns(each) for each in arrays)
    for batch in serve(batches, config, package, closure):
        yield batch.column(0) if config["is_column"] else batch.to_struct_array()


def _of_columns(arguments: Any) -> Any:
    from pyarrow import RecordBatch

    columns = list(arguments) if isinstance(arguments, tuple) else [arguments]
    return RecordBatch.from_arrays(columns, [""] * len(columns))


def _batch(arguments: Any, names: Any) -> Any:
    """Return the arguments of a function: the columns in one struct, or unnamed ones from SQL.

    ``names``: those of the function's columns, if it has its own. One column may itself be a struct.
    """
    from pyarrow import RecordBatch, StructArray

    if isinstance(arguments, StructArray) and not _is_vector(arguments.type):
        fields = [field.name for field in arguments.type]
        if names is None or len(names) > 1 or fields == names:
            columns = RecordBatch.from_struct_array(arguments).columns
            return RecordBatch.from_arrays([*map(_as_array, columns)], fields)
    found = _of_columns(arguments)
    return type(found).from_arrays([*map(_as_array, found.columns)], found.schema.names)


def _is_vector(kind: Any) -> bool:
    """Return whether a type is that of Spark ML's vectors."""
    import pyarrow

    is_struct = pyarrow.types.is_struct(kind) and [field.name for field in kind] == _VECTOR
    return is_struct and kind[0].type == pyarrow.int8() and pyarrow.types.is_list(kind[3].type)


def _as_array(column: Any) -> Any:
    """Return vectors of Spark ML as arrays, and other columns unchanged."""
    if not _is_vector(column.type):
        return column
    import pyarrow

    kinds, _, _, values = column.flatten()
    if 0 not in kinds.unique().to_pylist():
        return values
    return pyarrow.array([*map(_values, column.to_pylist())], values.type)


def _values(vector: dict[str, Any] | None) -> list[float] | None:
    if vector is None:
        return None
    if vector["type"] == 1:
        return list(vector["values"])
    values = [0.0] * vector["size"]
    for place, value in zip(vector["indices"], vector["values"], strict=True):
        values[place] = value
    return values


def _named(batches: Any, names: Any) -> Iterator[Any]:
    """Yield ``batches`` with the columns ``names``; None: they have their own."""
    for batch in batches:
        own = batch.schema.names
        if names is None and "" in own:
            raise InferError(
                "SQL passes columns without their names: write struct(a, b) instead of a, b, or name"
                ' them, as in hm.udf(predict, schema, columns=["a", "b"])'
            )
        if names is not None and len(own) != len(names):
            raise InferError(
                f"predict was called with {len(own)} columns, but `columns` of hm.udf names"
                f" {len(names)} ({', '.join(names)}): pass as many columns as names, without => in SQL"
            )
        yield type(batch).from_arrays(batch.columns, list(names)) if names else batch


def _served(batches: Iterator[Any], config: dict[str, Any], package: Any, closure: Any) -> Any:
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is not None:  # otherwise no model is needed
        if config["without_rows"]:
            first = first.slice(0, 0)
        with _guest(config) as guest:
            yield from guest.serve(itertools.chain([first], batches), config, package, closure)


# ── partitions in files ──────────────────────────────────────────────────────────────────────────


def serve_partition(batches: Any, config: dict[str, Any], package: Any, closure: Any) -> Any:
    """Predict the rows of one partition into a file; yield its name.

    The last column of ``batches`` has the hash of each row. ``config["parts"]``: the folder, what its
    journal says, its subfolders for files of this run and of an earlier one, the names of the latter by
    their partitions, and how such a name ends. A file of the same rows is moved; nothing is predicted then.
    """
    yield from _explained(_partition(batches, config, package, closure))


def _partition(batches: Any, config: dict[str, Any], package: Any, closure: Any) -> Iterator[Any]:
    from pyarrow import RecordBatch
    from pyspark import TaskContext

    parts, number = config["parts"], TaskContext.get().partitionId()
    _check_shared(parts["folder"], parts["journal"])
    folder = os.path.join(parts["folder"], parts["rows"])
    rows = _HashedRows(batches)
    if name := parts["done"].get(number):
        if not name.startswith(f"{number}.{rows.consumed()}."):
            raise InferError(
                f"--resume: the rows of partition {number} {CHANGED}: run the cell without --resume to start"
                " over"
            )
        place = os.path.join(folder, name)
        try:
            os.rename(os.path.join(parts["folder"], parts["earlier"], name), place)
        except FileNotFoundError:
            if not os.path.exists(place):  # otherwise Spark runs this task a second time
                raise
    else:
        path = os.path.join(folder, f"{number}.{TaskContext.get().taskAttemptId()}.incomplete")
        try:
            found = _served(
                _named(rows, config["names"][:-1]), {**config, "file": path}, package, closure
            )
            last = max(found, default=None)
            if last is None:  # no rows, and no guest
                open(path, "wb").close()
            name = f"{number}.{rows.text}.{last or 0}{parts['suffix']}"
            os.rename(path, os.path.join(folder, name))
        finally:
            if os.path.exists(path):
                os.unlink(path)
    yield RecordBatch.from_pydict({"o": [name]})


def _check_shared(folder: str, journal: str) -> None:
    try:
        with open(os.path.join(folder, "journal")) as file:
            is_same = file.read() == journal
    except OSError:
        is_same = False
    if not (is_same and os.access(folder, os.W_OK)):
        raise InferError(NOT_SHARED)


class _HashedRows:
    """The rows of a partition, without their hashes, which it adds up."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.n_rows = 0
        self._sum = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            *columns, hashes = batch.columns
            self.n_rows += batch.num_rows
            self._sum += int(hashes.to_numpy().view("uint64").sum(dtype="uint64"))
            yield type(batch).from_arrays(columns, batch.schema.names[:-1])

    @property
    def text(self) -> str:
        """What the rows are known by, in whatever order they came."""
        return f"{self.n_rows}.{self._sum % (1 << 64):016x}"

    def consumed(self) -> str:
        for _ in self:
            pass
        return self.text


def serve_parts(batches: Any, config: dict[str, Any], package: Any, closure: Any) -> Any:
    """Yield the rows of the files with the numbers in ``batches``; ``config["parts"]``: all their paths."""
    yield from _explained(_read(batches, config, package))


def _read(batches: Any, config: dict[str, Any], package: Any) -> Iterator[Any]:
    with _guest(config) as guest:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from guest.read(config["parts"][number], config, package)


# ── guests ───────────────────────────────────────────────────────────────────────────────────────


def _guest(config: dict[str, Any]) -> _CellGuest:
    """Return the guest for this run of a cell on this task's device, that of earlier tasks if there is one.

    A cell that is run again has other guests: the files that it reads may have changed.
    """
    kept = sys.modules.setdefault(_KEPT, types.ModuleType(_KEPT))
    guests: OrderedDict[Any, _CellGuest] = kept.__dict__.setdefault("guests", OrderedDict())
    device = _device() if config["gpu"] else "cpu"
    key = (config["run"], device)
    guest = guests.pop(key, None)
    while len(guests) >= _MOST_GUESTS:
        guests.popitem(last=False)
    guests[key] = guest = guest or _CellGuest(dict(config["env"]), config["of_worker"], device)
    return guest


def _device() -> str:
    """Return torch's name of the GPU that Spark assigned to this task.

    The variable that hides the others no longer has an effect in a process that has used a GPU.
    """
    from pyspark import TaskContext

    address = TaskContext.get().resources()["gpu"].addresses[0]
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if address in visible:
        return f"cuda:{visible.index(address)}"
    if not address.isdecimal():
        raise InferError(
            f"Spark assigned GPU {address}, whose index among this executor's GPUs is unknown"
        )
    return f"cuda:{address}"


class _CellGuest:
    """One cell in this worker process. As a context manager: its environment while it runs."""

    def __init__(self, env: dict[str, str], of_worker: dict[str, str], device: str) -> None:
        """``of_worker``: variables that the worker set for itself, and that a cell does not see."""
        self.main = types.ModuleType("__main__")
        own = (name for name, value in of_worker.items() if os.environ.get(name) == value)
        self._env: dict[str, str | None] = {
            **dict.fromkeys(own),
            **env,
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": device.partition(":")[2] or "0",
            "HYDROGEN_MAGIC_DEVICE": device,
        }
        """Its changes to the environment; None: without this variable."""
        self._names = {"hydrogen_magic", "cloudpickle"}
        """Top-level names of its own modules."""
        self._modules: dict[str, types.ModuleType] = {}
        self._hidden: dict[str, types.ModuleType] = {}
        """Modules of the worker that are removed in the meantime."""
        self._finders: list[Any] = []
        self._paths: list[str] = []
        self._state: dict[str, Any] = {}
        """What it has set in the process and in libraries."""
        self._worker: Any = None

    def read(self, path: str, config: dict[str, Any], package: Any) -> Iterator[Any]:
        """Yield the rows of the file of a finished partition."""
        self._load(package, config["package_digest"])
        from hydrogen_magic.node.prediction import partition_files

        yield from partition_files.read(path, config)

    def _load(self, package: Any, digest: str) -> None:
        if not any(isinstance(each, _Zip) for each in self._finders):
            self._finders = [_Zip(_content(package, digest))]
            sys.meta_path[:0] = self._finders

    def serve(
        self, batches: Any, config: dict[str, Any], package: Any, closure: Any
    ) -> Iterator[Any]:
        self._load(package, config["package_digest"])
        from hydrogen_magic.node.worker.inference import spark_inference

        with spark_inference.task_of(config) as task:
            try:
                if self._worker is None:
                    content = _content(closure, config["closure_digest"])
                    self._worker = spark_inference.CellWorker(self.hide, config, content)
                    del content
                task.enter("running")
                yield from self._worker.serve(batches, config, task)
            except (InferError, GeneratorExit):  # for the second, Spark needs no more of the rows
                raise
            except BaseException as error:
                raise InferError(spark_inference.message_of(error, config)) from error

    def hide(self, names: set[str]) -> None:
        """Remove the worker's own modules of these top-level names; the guest now owns the names."""
        self._names |= names
        self._hidden.update(_taken(names))

    # ── loading and unloading ──

    def __enter__(self) -> _CellGuest:
        self._before = dict(os.environ), list(sys.path), list(sys.meta_path)
        self._state_before = _state()
        _set_state(self._state)
        self._main_before = sys.modules["__main__"]
        self._hidden = _taken(self._names)
        sys.modules.update(self._modules)
        sys.modules["__main__"] = self.main
        sys.meta_path[:0] = self._finders
        sys.path[:0] = self._paths
        _change_environment(self._env)
        return self

    def __exit__(self, *error: object) -> None:
        env, path, finders = self._before
        self._env = _changes(env, dict(os.environ))
        _change_environment(_changes(dict(os.environ), env))
        self._paths = [each for each in sys.path if each not in path]
        self._finders = [each for each in sys.meta_path if each not in finders]
        sys.path[:], sys.meta_path[:] = path, finders
        self._modules = _taken(self._names)
        sys.modules.update(self._hidden)
        self._state = _state()
        _set_state(self._state_before)
        sys.modules["__main__"] = self._main_before


def _state() -> dict[str, Any]:
    """Return the working directory, and settings of libraries that change values."""
    found: dict[str, Any] = {"decimal": decimal.getcontext().copy()}
    with contextlib.suppress(OSError):  # it was deleted
        found["folder"] = os.getcwd()
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = numpy.geterr()
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_default_dtype(), torch.is_grad_enabled()
    return found


def _set_state(state: dict[str, Any]) -> None:
    """Set what :func:`_state` returns; for libraries that were not imported then, what they begin with."""
    decimal.setcontext(state.get("decimal", decimal.Context()).copy())
    with contextlib.suppress(OSError):
        os.chdir(state.get("folder", "."))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.seterr(**state.get("numpy", _NUMPY_BEGINS_WITH))
    if (torch := sys.modules.get("torch")) is not None:
        dtype, has_grad = state.get("torch", (torch.float32, True))
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_grad)


def _taken(names: set[str]) -> dict[str, types.ModuleType]:
    """Remove the modules below these top-level names from ``sys.modules``."""
    # a copy: threads of a task that was interrupted may still import modules
    found = [name for name in list(sys.modules) if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    """Return the changes from ``before`` to ``after``; None stands for a removed variable."""
    gone = dict.fromkeys(before.keys() - after.keys())
    return {**gone, **{name: v for name, v in after.items() if before.get(name) != v}}


def _change_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "TZ" in changes:
        time.tzset()


# ── what Spark has sent ──────────────────────────────────────────────────────────────────────────


def _content(sent: Any, digest: str) -> Any:
    """Return the content of a broadcast variable, or the path of a file.

    A function can outlive its session. Spark finds a broadcast variable by its number, which the next
    application assigns again; so it names its content. Files belong to one session of Spark Connect.
    """
    if hasattr(sent, "value"):
        value = sent.value
        vars(sent).pop("_value", None)  # Spark would keep it until this process ends
        match value:
            case (str(found), content) if found == digest:
                return content
        raise InferError(FOREIGN)
    from pyspark import SparkFiles

    path = SparkFiles.get(sent)
    if not os.path.exists(path):
        raise InferError(FOREIGN)
    return path


class _Zip(importlib.abc.SourceLoader):
    """Imports from a zip in memory: nothing is written to the executor's disk.

    Its bytecode is used if it is of this version of Python.
    """

    def __init__(self, content: bytes | str) -> None:
        """``content``: the zip itself, or its path."""
        if isinstance(content, str):
            with open(content, "rb") as file:
                content = file.read()
        self._packed = zipfile.ZipFile(io.BytesIO(content))
        self._names = frozenset(self._packed.namelist())

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._file(fullname)
        if file is None:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, origin=file)
        assert spec is not None
        spec.has_location = True  # gives the module its __file__
        return spec

    def get_filename(self, fullname: str) -> str:
        file = self._file(fullname)
        if file is None:
            raise ImportError(f"{fullname} is not in {_ROOT}", name=fullname)
        return file

    def get_data(self, path: str) -> bytes:
        try:
            return self._packed.read(path.removeprefix(f"{_ROOT}/"))
        except KeyError:
            raise OSError(path) from None

    def path_stats(self, path: str) -> dict[str, int]:
        return {"mtime": 0}  # importlib asks before it looks for bytecode, which is not checked

    def _file(self, fullname: str) -> str | None:
        base = fullname.replace(".", "/")
        files = (f for f in (f"{base}/__init__.py", f"{base}.py") if f in self._names)
        file = next(files, None)
        return file and f"{_ROOT}/{file}"
