"""Full disks: the errors that report one, and what is free."""

from __future__ import annotations

import errno
import os
import shutil

from hydrogen_magic.core.units import size_text

FULL = (errno.ENOSPC, errno.EDQUOT)


def room(folder: str | os.PathLike[str]) -> str:
    """Return the end of "does not fit into <folder>": what is free there, if known."""
    try:
        return f", where {size_text(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return ""
