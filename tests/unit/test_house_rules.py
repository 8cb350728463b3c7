"""The rules of the house: layers, doors for third parties, notebooks."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from hydrogen_magic import plugins
from hydrogen_magic.core.events import Event
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.validation import kinds_of
from hydrogen_magic.driver.placements.remote import packaging
from hydrogen_magic.driver.state import gang_state

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hydrogen_magic"


def _rooms(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LAYER = re.compile(r"^\| \d \| `([^`]+)` \|", re.M)
LAYERS = [_rooms(found) for found in _LAYER.findall((ROOT / "CONTRIBUTING.md").read_text())]
"""Rooms of the package, as in the table. A room imports its own layer and those above it there."""

DOORS = {
    "anywidget": ("views",),
    "IPython": ("notebook", "views", "node.worker.interactive.ipython_shell", "__init__"),
    "fsspec": ("node.data_files",),
    "cloudpickle": ("serialization.pickler", "capture"),
    "ipykernel": ("notebook", "views"),
    "mlflow": ("driver.trackers.mlflow",),
    "pytest": ("testing",),
    "pandas": _rooms(
        "capture driver.gang driver.history driver.metrics driver.sweep inference node.prediction"
        " spark.model views"
    ),
    "polars": ("inference", "node.prediction"),
    "matplotlib": ("node.worker.interactive.figures", "node.worker.interactive.figure_backend"),
    "pynvml": ("node.agent",),
    "psutil": ("driver.placements", "frameworks.horovod.build"),
    "rich": ("views", "node.worker.observe.rich"),
    "traitlets": ("notebook", "views"),
    "wandb": ("driver.trackers.wandb",),
    "zmq": ("transport.channel",),
}
"""Third party -> the rooms (or files) that may import it, wherever in the file."""

FRAMEWORKS = _rooms("torch numpy horovod deepspeed tensorflow jax keras pyspark tqdm pyarrow")
"""Imported only inside functions: nobody pays for what a cell does not use."""
OF_NUMBERS = _rooms(
    "driver.state.growable_arrays driver.state.span_tracks views.point_buckets views.curve_tips views.curves"
    " views.comparison views.sweep views.widget views.static_svg"
)
"""Arithmetic of views and timelines on numpy; imported on use themselves."""
OF_FRAMES = _rooms("inference node.prediction node.worker.inference")
"""Arithmetic of frames on Arrow; imported on use themselves."""
OF_SPARK_ML = ("spark.estimator", "spark.model", "spark.params", "spark.persistence")
"""Classes of Spark ML derive from pyspark's; imported on use themselves."""
NOTEBOOK_SIDE = {"IPython", "ipykernel", "zmq", "pandas", "psutil", "rich", "traitlets"}


@dataclass(frozen=True)
class Import:
    """One imported module, and where the import stands."""

    file: str
    """Dotted name of the importing file below the package: ``worker.main``."""
    target: str
    """Absolute dotted name of what is imported."""
    line: int
    at_import_time: bool
    """False inside a function and under ``if TYPE_CHECKING``."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


# ── reading the package ──────────────────────────────────────────────────────────────────────────


def _files() -> dict[str, Path]:
    """Return dotted name -> path of every file of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_folder = parts[-1] == "__init__" and len(parts) > 1
        found[".".join(parts[:-1] if is_folder else parts)] = path
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _walk(
    node: ast.AST, *, lazy: bool = False, types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # most nodes; an import is a statement
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, lazy, types
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _walk(child, lazy=lazy or is_function, types=types or _is_type_checking(child))


def _targets(node: ast.Import | ast.ImportFrom, file: str, is_folder: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        here = ["hydrogen_magic", *(file.split(".") if file != "__init__" else [])]
        up = node.level - (1 if is_folder else 0)
        base = ".".join([*here[: len(here) - up], *([node.module] if node.module else [])])
    if base.split(".")[0] == "hydrogen_magic":
        return [f"{base}.{alias.name}" for alias in node.names]
    return [base]


@lru_cache
def imports() -> tuple[Import, ...]:
    found = []
    for file, path in _files().items():
        is_folder = path.name == "__init__.py"
        for node, lazy, types in _walk(ast.parse(path.read_text())):
            for target in _targets(node, file, is_folder):
                found.append(Import(file, target, node.lineno, not lazy and not types))
    return tuple(found)


def _inside() -> Iterator[tuple[Import, str]]:
    """Yield the imports of the package by itself, with the imported file's name."""
    files = _files()
    for found in imports():
        head, _, rest = found.target.partition(".")
        if head == "hydrogen_magic":
            name = rest or "__init__"
            while name not in files and "." in name:
                name = name.rpartition(".")[0]  # a name inside a module
            yield found, name if name in files else "__init__"


def _layer(file: str) -> int:
    """Return the layer of the longest name in the table that the file's begins with."""
    named = {room: n for n, rooms in enumerate(LAYERS) for room in rooms}
    own = [room for room in named if _is_in(file, (room,))]
    return named[max(own, key=len)] if own else len(LAYERS)


def _is_in(file: str, rooms: tuple[str, ...]) -> bool:
    return any(fnmatchcase(file, room) or fnmatchcase(file, f"{room}.*") for room in rooms)


@lru_cache
def sent() -> frozenset[str]:
    """Return the files that machines with ranks have: they import nothing else of this package.

    ``compat`` is sent, too, and imports more where it starts gangs, which ranks refuse. So is ``__init__``,
    which imports on use what users call.
    """
    with zipfile.ZipFile(io.BytesIO(packaging.code())) as archive:
        paths = {ROOT / name for name in archive.namelist()}
    found = (file for file, path in _files().items() if path in paths)
    return frozenset(file for file in found if not _is_in(file, ("compat", "__init__")))


def _outside() -> Iterator[tuple[Import, str]]:
    """Yield the imports of third parties, with the top-level name."""
    for found in imports():
        head = found.target.split(".")[0]
        if head not in {"hydrogen_magic", "annotationlib", *sys.stdlib_module_names}:  # of 3.14
            yield found, head


# ── the rules ────────────────────────────────────────────────────────────────────────────────────


def test_every_room_has_its_layer() -> None:
    assert [file for file in _files() if _layer(file) == len(LAYERS)] == []


def test_imports_go_up_the_page_only() -> None:
    wrong = [str(found) for found, file in _inside() if _layer(file) > _layer(found.file)]
    assert wrong == []


def test_no_import_cycles() -> None:
    """Imports inside functions and for type checkers count too.

    A folder's ``__init__`` may choose one of its own files by name on use.
    """
    needs: dict[str, set[str]] = {file: set() for file in _files()}
    for found, file in _inside():
        if file != found.file and not file.startswith(f"{found.file}."):
            needs[found.file].add(file)
    TopologicalSorter(needs).prepare()  # raises CycleError, which has the cycle


def test_horovod_is_a_plug_in() -> None:
    """Its name is in its own package, in drop-in classes for its launchers, and in entry points."""
    wrong = [
        file
        for file, path in _files().items()
        if not _is_in(file, ("frameworks.horovod", "compat", "node.worker.sparkdl"))
        and "horovod" in path.read_text().lower()
    ]
    assert wrong == []


def test_what_remote_placements_share_knows_no_engine() -> None:
    shared = ("driver.placements.remote", "node.agent", "transport.channel")
    text = {file: path.read_text() for file, path in _files().items() if _is_in(file, shared)}
    about_spark = r"(?i)spark(?!dl)|(?<!run_in_)executor"
    assert [file for file, content in text.items() if re.search(about_spark, content)] == []


def test_pairs_of_sockets_are_blocking_whatever_the_notebook_has_set() -> None:
    """Only the first program on a host, which is sent without the package, makes one by itself."""
    wrong = [file for file, path in _files().items() if "socket.socketpair(" in path.read_text()]
    assert sorted(wrong) == ["node.agent.host_task", "transport.framing"]


def test_each_third_party_has_its_door() -> None:
    wrong = [
        str(found)
        for found, name in _outside()
        if name not in FRAMEWORKS and not _is_in(found.file, DOORS.get(name, ()))
    ]
    assert wrong == []


def test_frameworks_are_imported_on_use() -> None:
    wrong = [
        str(found)
        for found, name in _outside()
        if name in FRAMEWORKS and found.at_import_time
        if not (name == "numpy" and _is_in(found.file, OF_NUMBERS))
        if not (name in ("numpy", "pyarrow") and _is_in(found.file, OF_FRAMES))
        if not (name in ("pyspark", "pyarrow") and _is_in(found.file, OF_SPARK_ML))
    ]
    assert wrong == []


def test_a_kernel_that_shows_no_live_view_pays_for_no_numbers() -> None:
    wrong = [
        str(found)
        for found, file in _inside()
        if _is_in(file, OF_NUMBERS) and found.at_import_time and not _is_in(found.file, OF_NUMBERS)
    ]
    assert wrong == []


def test_what_is_sent_to_other_machines_imports_nothing_that_stays() -> None:
    wrong = [
        str(found)
        for found, file in _inside()
        if found.file in sent() and file not in {*sent(), "__init__"}
    ]
    assert wrong == []
    assert {"errors", "core.job", "node.worker.main", "frameworks.jax.node.observe"} <= sent()


@pytest.mark.parametrize("name", ["torch", "horovod", "jax"])
def test_what_a_rendezvous_serves_is_sent_to_other_machines(name: str) -> None:
    spec = JobSpec(np=2, gpu=False, rendezvous=name)
    plan = plugins.placement("local").plan(spec)
    info = plugins.rendezvous(name).prepare(plan, "10.0.0.1", 1, spec=spec, gang="g", attempt=0)
    assert info.service is not None
    module = info.service.function.partition(":")[0]
    assert module.removeprefix("hydrogen_magic.") in sent()


def test_checks_of_libraries_import_the_standard_library_only() -> None:
    """Their source runs on hosts that do not have this package."""
    checks = {each.library for each in plugins.every_rendezvous() if each.library}
    imported = [each for each in imports() if f"hydrogen_magic.{each.file}" in checks]
    assert len(checks) == len({each.file for each in imported}) >= 3
    heads = {each.target.partition(".")[0] for each in imported}
    assert heads <= sys.stdlib_module_names


def test_every_event_has_a_rule_that_folds_it() -> None:
    rules = {*gang_state._GANG_RULES, *gang_state._RANK_RULES}
    assert set(kinds_of(Event).values()) == rules


def test_a_rank_imports_nothing_of_a_notebook() -> None:
    of_ranks = {file for file in sent() if not _is_in(file, ("transport",))}
    wrong = [
        str(found)
        for found, name in _outside()
        if name in NOTEBOOK_SIDE and found.file in of_ranks and found.at_import_time
    ]
    assert wrong == []


@pytest.mark.parametrize("path", sorted((ROOT / "example_notebooks").glob("*.ipynb")), ids=str)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"]] == []
