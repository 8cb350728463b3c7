"""Data of ``hm.dataset`` and checkpoints on a host that shares no disk with the notebook's machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hydrogen_magic.core import messages as msg


class HostFolders:
    """The folders of one kind that the kernel has sent to this host.

    They stay until it deletes them, or the agent ends. Parts are written to disk as they arrive: the data
    may be larger than memory. A folder has its name when it is complete; until then its files are in
    a folder of the transfer.
    """

    def __init__(self, folder: Path, send: Callable[[msg.TransferKept], None]) -> None:
        """``folder``: created when the first file arrives. ``send``: sends a message to the kernel."""
        self.folder = folder
        self._send = send
        self._arriving: dict[int, Path] = {}
        """Transfers on the way -> their folders."""
        self._newest = 0
        """The highest number of a transfer so far."""

    @property
    def is_empty(self) -> bool:
        """Whether no folder is complete here."""
        return not any(self.names())

    def names(self) -> Iterator[str]:
        """Yield the names of complete folders."""
        return (folder.name for folder in self.folder.glob("[!.]*"))

    def take(self, label: msg.FolderFile, part: msg.FilePart, data: memoryview) -> None:
        """Write a part of a file. Remaining parts of a transfer that has ended are left out."""
        number = label.transfer
        try:
            if number > self._newest:
                self._newest = number
                self._arriving[number] = self.folder / f".{number}.{label.name}"
                self._arriving[number].mkdir(parents=True)
            if number in self._arriving:
                path = self._arriving[number] / label.file_name
                with path.open("r+b" if part.offset else "wb") as file:
                    file.seek(part.offset)
                    file.write(data)
        except OSError as error:
            self._refuse(number, error)

    def keep(self, command: msg.KeepFolder) -> None:
        """Give a folder its name: its files are complete."""
        number, path = command.transfer, self.folder / command.name
        if number not in self._arriving:
            return  # it was refused, and that was reported
        try:
            shutil.rmtree(path, ignore_errors=True)  # complete, but the kernel had stopped waiting
            self._arriving[number].rename(path)
        except OSError as error:
            self._refuse(number, error)
            return
        del self._arriving[number]
        self._send(msg.TransferKept(number))

    def _refuse(self, number: int, error: OSError) -> None:
        shutil.rmtree(self._arriving.pop(number), ignore_errors=True)
        self._send(msg.TransferKept(number, f"{error.strerror} ({self.folder})"))

    def drop_incomplete(self) -> None:
        """Delete what was on its way when the attempt ended."""
        while self._arriving:
            shutil.rmtree(self._arriving.popitem()[1], ignore_errors=True)

    def forget(self, names: Iterable[str]) -> None:
        """Delete these folders, also what is on its way."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            for number, folder in list(self._arriving.items()):
                if folder.name == f".{number}.{name}":
                    shutil.rmtree(self._arriving.pop(number), ignore_errors=True)
