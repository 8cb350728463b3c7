"""Local modules and packages: the user's own code, sent in its current state on disk."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import os
import re
import site
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from hydrogen_magic.core import syntax
from hydrogen_magic.core.units import size_text
from hydrogen_magic.serialization.closure import ModuleSource

_MAX_FILES = 2000
_MAX_BYTES = 32 << 20
"""A larger tree is most likely an installation in an unusual place; ranks import it from there."""


class LocalModules:
    """Collects the sources of local modules, and of the local modules that those import."""

    def __init__(self) -> None:
        self.sources: dict[str, ModuleSource] = {}
        self.files: dict[str, ModuleFile] = {}
        """Those of the sources, as they were when they were read."""
        self.warnings: list[str] = []
        self._seen: set[str] = set()
        _resolved.cache_clear()  # a link may lead elsewhere than for the cell before

    @functools.cached_property
    def _path_version(self) -> tuple[object, ...]:
        """The directories of the module path as they were for this cell."""
        return tuple(_directory_version(entry) for entry in sys.path if isinstance(entry, str))

    def add(self, modules: Iterable[str]) -> None:
        """Add the whole top-level package of every local module in ``modules``."""
        todo = [name.partition(".")[0] for name in modules]
        while todo:
            root = todo.pop()
            if root in self._seen:
                continue
            self._seen.add(root)
            for path in local_paths(root):
                todo += self._add_tree(root, path)

    def is_local(self, module: str) -> bool:
        """Add the module's package if it is local; return whether it is."""
        self.add([module])
        return module.partition(".")[0] in self.sources

    def reached(self, modules: Iterable[str]) -> set[str]:
        """Return ``modules`` and all modules that they import through added local modules."""
        found: set[str] = set()
        todo = list(modules)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._imported_by(name)
                todo += [name.rpartition(".")[0]] if "." in name else []
        return found

    def _add_tree(self, root: str, path: Path) -> list[str]:
        """Add one tree; return the roots of what it imports."""
        found = list(_files(root, str(path)))
        nbytes = sum(file.size for file in found)
        if len(found) > _MAX_FILES or nbytes > _MAX_BYTES:
            self.warnings.append(
                f"the local package {root} in {path} has {len(found)} files, {size_text(nbytes)}: "
                "it is too large to send, so ranks import it from their own disk"
            )
            return []
        mentioned: dict[str, frozenset[str]] = {}
        for file in found:
            try:
                source, mentioned[file.name] = _read(file)
            except (OSError, SyntaxError, UnicodeDecodeError):  # importers find it on disk
                continue
            if file.name not in self.sources:
                self.sources[file.name] = ModuleSource(source, file.path, file.is_package)
                self.files[file.name] = file
        new = {each for each in frozenset().union(*mentioned.values()) if self._is_new(each)}
        roots: set[str] = set()
        for name in [name for name, names in mentioned.items() if not new.isdisjoint(names)]:
            roots |= new & {each.partition(".")[0] for each in self._imported_by(name)}
        return sorted(roots)

    def _is_new(self, root: str) -> bool:
        """Whether ``root`` is local and was not added yet. Others count as seen: they are asked for often."""
        if root not in self._seen and not self._is_found(root):
            self._seen.add(root)
        return root not in self._seen

    def _is_found(self, root: str) -> bool:
        if root in sys.modules:
            return bool(local_paths(root))
        # Most of them are optional libraries that are not there, which every cell would look for.
        return _is_local_at(root, self._path_version)

    def _imported_by(self, name: str) -> list[str]:
        module = self.sources.get(name)
        return [] if module is None else _imported(module.source, name, module.is_package)


def is_installed(module: str) -> bool:
    """Whether the module is third-party: not of Python itself, not local, and not ours."""
    root = module.partition(".")[0]
    return not _is_everywhere(root) and bool(_locations(root)) and not local_paths(root)


def local_paths(root: str) -> list[Path]:
    """Return the files or directories of top-level module ``root`` if it is local, otherwise none."""
    if _is_everywhere(root):
        return []
    locations = _locations(root)
    if any(_is_installation(path) for path in locations):
        return []
    return [path for path in locations if path.is_dir() or path.suffix == ".py"]


@functools.lru_cache(maxsize=4096)
def _is_local_at(root: str, version: tuple[object, ...]) -> bool:
    """Whether a module that is not loaded is local; ``version``: of the module path."""
    return bool(local_paths(root))


def _directory_version(path: str) -> tuple[str, int, int]:
    """Return what differs once a directory has another entry, as importers see it."""
    try:
        status = os.stat(path or os.curdir)
    except OSError:
        return path, 0, 0
    return path, status.st_ino, status.st_mtime_ns


def _is_everywhere(root: str) -> bool:
    """Whether every rank has this module anyway: Python's own, ``__main__``, and ours."""
    ours = ("__main__", "__mp_main__", "hydrogen_magic")
    return root in sys.stdlib_module_names or root in ours


def _locations(root: str) -> list[Path]:
    spec = _spec(root)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [_resolved(str(place)) for place in spec.submodule_search_locations]
    return [_resolved(spec.origin)] if spec.has_location and spec.origin else []


@functools.cache
def _resolved(place: str) -> Path:
    """Return the path without symbolic links; a cell looks it up several times for every module."""
    try:
        found = os.stat(place)
    except OSError:
        return Path(place).resolve()
    return _resolved_to(place, found.st_dev, found.st_ino)


@functools.lru_cache(maxsize=4096)
def _resolved_to(place: str, device: int, inode: int) -> Path:
    """Return the path without symbolic links while this file is there: that takes ten times as long."""
    return Path(place).resolve()


def _spec(root: str) -> importlib.machinery.ModuleSpec | None:
    module = sys.modules.get(root)
    try:
        if module is not None:  # bypasses its own __getattribute__, which may load it
            known = object.__getattribute__(module, "__dict__").get("__spec__")
            if known is not None:
                return known  # type: ignore[no-any-return]
        return importlib.machinery.PathFinder.find_spec(root)
    except (ImportError, ValueError, AttributeError):
        return None


@functools.lru_cache(maxsize=1)
def _installation_roots() -> tuple[Path, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), os.environ.get("SPARK_HOME", "")]
    return tuple(Path(path).resolve() for path in paths if path)


def _is_installation(path: Path) -> bool:
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return True
    return any(root in path.parents for root in _installation_roots())


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ModuleFile:
    """A module of a tree."""

    name: str
    path: str
    """A directory if it is a package without ``__init__.py``."""
    is_package: bool = False
    size: int = 0
    modified_ns: int = 0


def _files(
    name: str, path: str, above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[ModuleFile]:
    """Yield every module of a tree. Looks at each file once: a tree may have a thousand, for every cell.

    ``above``: device and inode of the directories that contain it; a link back to one of them is left out.
    """
    if not os.path.isdir(path):
        yield from _file(name, path, Path(path).stat)
        return
    entries: dict[str, os.DirEntry[str]] = {}
    with suppress(OSError):  # not readable, or deleted meanwhile
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in above:
            return
        above |= {(status.st_dev, status.st_ino)}
        entries = {entry.name: entry for entry in os.scandir(path)}
    init = entries.pop("__init__.py", None)
    if init is None or not os.path.isfile(init.path):
        yield ModuleFile(name, path, is_package=True)
    else:
        yield from _file(name, init.path, init.stat, is_package=True)
    for each, entry in sorted(entries.items()):
        stem, suffix = os.path.splitext(each)
        if _is_directory(entry):
            if _may_be_package(entry):
                yield from _packages(f"{name}.{each}", entry.path, above)
        # Only importlib.import_module imports 02-fit.
        elif suffix == ".py" and (stem.isidentifier() or f"{name}.{stem}" in sys.modules):
            yield from _file(f"{name}.{stem}", entry.path, entry.stat)


def _file(
    name: str, path: str, stat: Callable[[], os.stat_result], *, is_package: bool = False
) -> Iterator[ModuleFile]:
    with suppress(OSError):  # a link to nothing, or a file that is being replaced
        status = stat()
        yield ModuleFile(name, path, is_package, status.st_size, status.st_mtime_ns)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a link to one; False for a link that cannot be followed."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _packages(name: str, path: str, above: frozenset[tuple[int, int]]) -> Iterator[ModuleFile]:
    """Yield the modules of a directory, if there are any."""
    found = list(_files(name, path, above))
    if any(file.path.endswith(".py") for file in found):
        yield from found


def _may_be_package(entry: os.DirEntry[str]) -> bool:
    skipped = entry.name in ("__pycache__", "node_modules", "site-packages")
    has_python = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
    return entry.name.isidentifier() and not skipped and not has_python


_cache: dict[str, tuple[ModuleFile, tuple[str, frozenset[str]]]] = {}
"""By path: the file as it was, its source and the top-level modules that it may import."""

_IMPORT = re.compile(
    r"(?:^|[;:])[ \t\f]*(?:from\s+([^\W\d]\w*)|import\s+([^\W\d][\w., \t]*))", re.MULTILINE
)
"""An import statement, or what looks like one in a text. The first names of relative imports are missing."""


def _read(file: ModuleFile) -> tuple[str, frozenset[str]]:
    """Return a file's source and the top-level modules that it may import.

    To parse all files of a large package takes seconds. So only those are parsed that may import another
    local package, and those that the cell may import.
    """
    if not file.path.endswith(".py"):
        return "", frozenset()
    known = _cache.get(file.path)
    if known is None or known[0] != file:
        with tokenize.open(file.path) as opened:
            text = opened.read()
        known = _cache[file.path] = file, (text, frozenset(_mentioned(text)))
    return known[1]


def _mentioned(text: str) -> Iterator[str]:
    for found in _IMPORT.finditer(text.replace("\\\n", " ")):
        for name in (found[1] or found[2]).split(","):
            yield from name.partition(".")[0].split()[:1]


@functools.lru_cache(maxsize=_MAX_FILES)
def _imported(text: str, name: str, is_package: bool) -> list[str]:
    """Return the full names of the modules that a module imports and accesses."""
    tree = syntax.parsed(text)  # the rank reports an error when it imports the module
    package = name if is_package else name.rpartition(".")[0]
    return [*dict.fromkeys((*imported_modules(tree, package), *_accessed(tree)))]


def imported_modules(tree: ast.AST, package: str = "") -> list[str]:
    """Return full names of the modules that ``tree`` imports anywhere, in order; see :func:`imported_by`."""
    return imported_by(ast.walk(tree), package)


def imported_by(nodes: Iterable[ast.AST], package: str = "") -> list[str]:
    """Return full names of the modules that ``nodes``, all those of a tree, import.

    ``from a import b`` gives ``a`` and ``a.b``, which may not be a module. ``package``: base of relative
    imports.
    """
    found: dict[str, None] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if base:
                found[base] = None
                found.update((f"{base}.{a.name}", None) for a in node.names if a.name != "*")
    return list(found)


def is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether it is ``if __name__ == "__main__"``, whose body an import does not run."""
    match node:
        case ast.If(ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])):
            return True
    return False


def _accessed(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of each attribute of an imported module, such as ``torch.optim``.

    Attributes that are not modules are among them.
    """
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                modules[alias.asname or root] = alias.name if alias.asname else root
    for node in ast.walk(tree):
        name = _dotted(node) if isinstance(node, ast.Attribute) else ""
        root, _, rest = name.partition(".")
        if root in modules:
            yield f"{modules[root]}.{rest}"


def _dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for that expression, and an empty string for one of another form."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


def _absolute(node: ast.ImportFrom, package: str) -> str:
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:  # more dots than packages
        return ""


def find_without_importing(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of ``module`` without running any code of its parent packages."""
    path: list[str] = []
    spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        spec = _submodule_spec(name, path) if depth else _spec(name)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _submodule_spec(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module in a package whose submodules are at ``path``."""
    try:
        return importlib.machinery.PathFinder.find_spec(name, path)
    except (KeyError, ModuleNotFoundError):
        # A namespace package in one that is not loaded: google.cloud in google.
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        folders = (Path(place, name.rpartition(".")[2]) for place in path)
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec


def importable_parts(names: Iterable[str]) -> set[str]:
    """Return the longest beginning of each dotted name that is a module, at least its first part."""

    @functools.cache
    def longest(name: str) -> tuple[str, Sequence[str]]:
        """Return that beginning, and where its submodules are."""
        package = name.rpartition(".")[0]
        if not package or name in sys.modules:
            return name, _places(_spec(name))
        known, path = longest(package)
        if known != package:
            return known, ()
        spec = _submodule_spec(name, path) if path else None
        return (name, _places(spec)) if spec else (package, path)

    return {longest(name)[0] for name in names}


def _places(spec: importlib.machinery.ModuleSpec | None) -> Sequence[str]:
    return () if spec is None else [*(spec.submodule_search_locations or ())]
