"""The package as a zip, for machines without it: the part that agents and ranks need."""

from __future__ import annotations

import functools
import io
import marshal
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec, source_hash
from pathlib import Path

from hydrogen_magic import plugins
from hydrogen_magic.errors import PlacementError

_PACKAGE = Path(__file__).parents[3]
_SENT = ("core", "serialization", "transport", "node", "compat")
"""Packages that agents and ranks import. Of ``compat``, ranks use what does not start gangs."""
_SENT_FILES = ("__init__.py", "errors.py", "testing/__init__.py", "testing/ranks.py")
"""Other modules that they import."""
_STAMP = (2020, 1, 1, 0, 0, 0)
"""A constant time: equal files make an equal zip."""


def code() -> bytes:
    """Return a zip of what agents and ranks need: of ``hydrogen_magic``, plug-ins and ``cloudpickle``.

    cloudpickle is included so that ranks unpickle with the version that pickled the closure.
    """
    return _zip(plugins.shipped())


def not_sent(modules: Iterable[str]) -> list[str]:
    """Return the top-level names of those ``modules`` that must be installed on the machines."""
    names = {module.partition(".")[0] for module in modules}
    return sorted(names - {"cloudpickle", "hydrogen_magic", *plugins.shipped()})


def compiled() -> bytes:
    """Return :func:`code` with the bytecode of this Python beside it, where importlib looks for it.

    It triples the size, and nearly halves the time in which a Python worker imports the modules.
    """
    return _zip(plugins.shipped(), is_compiled=True)


@functools.cache
def _zip(packages: tuple[str, ...], is_compiled: bool = False) -> bytes:
    files = dict(_own_files())
    for package in (*packages, "cloudpickle"):
        files |= dict(_files_of(package))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, _STAMP), path.read_bytes(), zipfile.ZIP_DEFLATED)
            if is_compiled and (bytecode := _bytecode(path)) is not None:
                archive.writestr(
                    zipfile.ZipInfo(_cached(name), _STAMP), bytecode, zipfile.ZIP_DEFLATED
                )
    return packed.getvalue()


def _cached(name: str) -> str:
    """Return the name of a file's bytecode for workers with the usual settings, whatever those are here."""
    folder, _, file = name.rpartition("/")
    tag = sys.implementation.cache_tag
    return f"{folder}/__pycache__/{file.removesuffix('.py')}.{tag}.pyc"


def _bytecode(path: Path) -> bytes | None:
    """Return what a ``.pyc`` file has that is used without a look at its source (PEP 552).

    None for a file that is no module of this Python, such as a template in a package.
    """
    try:
        compiled = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    except (SyntaxError, ValueError):
        return None
    unchecked = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + unchecked + source_hash(path.read_bytes()) + marshal.dumps(compiled)


def _own_files() -> Iterator[tuple[str, Path]]:
    single = (_PACKAGE / name for name in _SENT_FILES)
    folders = (path for package in _SENT for path in (_PACKAGE / package).rglob("*.py"))
    for path in (*single, *folders):
        yield f"hydrogen_magic/{path.relative_to(_PACKAGE).as_posix()}", path


def _files_of(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package, and the ``__init__`` of those above it."""
    above, _, _ = package.rpartition(".")
    while above:
        yield f"{above.replace('.', '/')}/__init__.py", _init_of(above)
        above, _, _ = above.rpartition(".")
    origin = _init_of(package)
    if origin.name != "__init__.py":
        yield f"{package.replace('.', '/')}.py", origin
        return
    folder = origin.parent
    for path in folder.rglob("*.py"):
        yield f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}", path


def _init_of(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise PlacementError(
            f"the package {package} must be sent to other machines, but is not found here"
        )
    return Path(found.origin)


@functools.cache
def bytecode(module: str) -> bytes:
    """Return one of our modules as marshalled code, for the minor version of this Python alone."""
    return marshal.dumps(compile(source(module), module, "exec"))


def source(module: str) -> str:
    """Return the source of one of our modules; empty for an empty name."""
    found = find_spec(module) if module else None
    return "" if found is None or found.origin is None else Path(found.origin).read_text()
