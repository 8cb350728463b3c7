"""Entry points of a plug-in that is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["declare"]


def declare(
    folder: Path, group: str, points: Mapping[str, str], distribution: str = "plug-in"
) -> None:
    """Write metadata of a distribution into ``folder``; it counts once that is in ``sys.path``.

    Another call for the same distribution adds to it.

    ``points``: name -> ``module:object``, of the entry points' ``group``. In a test::

        declare(tmp_path, "hydrogen_magic.placements", {"mine": "my_module:MyPlacement"})
        monkeypatch.syspath_prepend(tmp_path)
    """
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    with open(info / "entry_points.txt", "a") as file:
        file.write("\n".join([f"[{group}]", *lines, ""]))
