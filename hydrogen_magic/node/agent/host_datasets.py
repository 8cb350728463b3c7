"""Data of ``hm.dataset`` on a host that shares no disk with the notebook's machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core.messages import DatasetFile, DatasetFileStored, FilePart


class HostDatasets:
    """The datasets that the kernel has sent to this host; they stay until it deletes them, or the agent ends.

    Parts are written to disk as they arrive: the data may be larger than memory.
    """

    def __init__(self, folder: Path, send: Callable[[DatasetFileStored], None]) -> None:
        """``folder``: created when the first file arrives. ``send``: sends a message to the kernel."""
        self.folder = folder
        self._send = send

    def take(self, label: DatasetFile, part: FilePart, data: memoryview) -> None:
        """Write a part of a file, which appears under its name when it is complete."""
        path = self.folder / Path(label.dataset).name / Path(label.file_name).name
        arriving = path.with_name(f".{path.name}")
        try:
            if part.offset == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not arriving.exists():
                return  # remaining parts of a file that could not be stored
            with arriving.open("wb" if part.offset == 0 else "r+b") as file:
                file.seek(part.offset)
                file.write(data)
            if part.offset + data.nbytes == part.size:
                arriving.rename(path)
                self._send(DatasetFileStored(label))
        except OSError as error:
            with suppress(OSError):
                arriving.unlink()
            self._send(DatasetFileStored(label, f"{error.strerror} ({self.folder})"))

    def forget(self, datasets: Iterable[str]) -> None:
        """Delete the data of these datasets."""
        for name in datasets:
            shutil.rmtree(self.folder / Path(name).name, ignore_errors=True)
