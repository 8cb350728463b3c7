"""The local modules that the ranks of a session have: which of them were edited since they were sent."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace

from hydrogen_magic.capture.modules import ModuleFile

_UNKNOWN_NS = -1
"""Modification time of a file whose contents some ranks may not have."""


class SentModules:
    """The files of the local modules whose sources the ranks of a session have."""

    def __init__(self) -> None:
        self._files: dict[str, ModuleFile] = {}

    def edited(self, others: Collection[str]) -> dict[str, ModuleFile]:
        """Return the files that have changed, by module, without the modules ``others``."""
        found = self._files.items()
        return {name: one for name, one in found if name not in others and _is_edited(one)}

    def after_cell(self, files: Mapping[str, ModuleFile], *, is_whole: bool, failed: bool) -> None:
        """Note the files of the modules that a cell has sent.

        ``is_whole``: to all ranks. A cell that has failed may have ended before the ranks loaded them.
        """
        for name, file in files.items():
            before = self._files.get(name)
            is_certain = before == file or (not failed and (is_whole or before is None))
            self._files[name] = file if is_certain else replace(file, modified_ns=_UNKNOWN_NS)


def _is_edited(file: ModuleFile) -> bool:
    if not file.path.endswith(".py"):  # a package without __init__.py
        return False
    try:
        status = os.stat(file.path)  # 50 of them take a tenth of a millisecond, for each cell
    except OSError:
        return False
    return (status.st_mtime_ns, status.st_size) != (file.modified_ns, file.size)
