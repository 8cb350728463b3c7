"""A Python whose Horovod writes its timeline as the release does: what ours is compared with.

All other changes are in it, those without which it would not build or not be comparable.
"""

from __future__ import annotations

import site
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hydrogen_magic.frameworks.horovod import build
from hydrogen_magic.frameworks.horovod.build import source_patches

__all__ = ["python"]


@contextmanager
def python() -> Iterator[Path]:
    """Build that Horovod if need be (two minutes, then from the cache); yield an interpreter with it."""
    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as place:
        venv.create(place, with_pip=False, symlinks=True)
        own = Path(sysconfig.get_path("purelib", "venv", {"base": place}))
        with zipfile.ZipFile(_wheel()) as wheel:
            wheel.extractall(own)
        # Everything else comes from here; what lies in a directory itself is found first.
        lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
        (own / "rest.pth").write_text("\n".join(lines) + "\n")
        yield Path(place, "bin", "python")


def _wheel() -> Path:
    every = source_patches.for_standard

    def without_writer(standard: int) -> tuple[source_patches.SourcePatch, ...]:
        return tuple(change for change in every(standard) if change not in source_patches.WRITER)

    with mock.patch.object(source_patches, "for_standard", without_writer):
        return build.build(is_forced=False, is_installed=False, say=print).wheel
