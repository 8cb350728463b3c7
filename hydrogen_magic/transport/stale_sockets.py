"""Directories of Unix sockets whose processes were killed."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from contextlib import suppress


def remove_stale(parent: str, prefix: str, name: str, least_s: float) -> None:
    """Remove this user's directories ``prefix…`` in ``parent`` whose socket ``name`` refuses connections.

    ``least_s``: the socket of a younger directory may not listen yet.
    """
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and _is_stale(entry, name, least_s):
                shutil.rmtree(entry, ignore_errors=True)


def _is_stale(directory: os.DirEntry[str], name: str, least_s: float) -> bool:
    try:
        found = directory.stat(follow_symlinks=False)
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or time.time() - found.st_mtime < least_s:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(f"{directory.path}/{name}")
    except ConnectionRefusedError:
        return True
    except OSError:  # no socket, or one that is too busy to answer
        return False
    return False
