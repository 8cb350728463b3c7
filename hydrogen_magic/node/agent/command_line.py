"""The command line of agents and forkservers.

They import this package from the caller's installation, and search Python's own directories first
for everything else: a file such as ``queue.py`` beside the notebook must not replace a module they
need. Plain ``-m`` with the notebook's module path in ``PYTHONPATH`` would put the notebook's
directory before the standard library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = """\
import importlib, importlib.util, json, sys
root, path, module = sys.argv[1:4]
sys.path += [entry for entry in json.loads(path) if entry not in sys.path]
spec = importlib.util.spec_from_file_location(
    "hydrogen_magic", root + "/__init__.py", submodule_search_locations=[root]
)
package = sys.modules["hydrogen_magic"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(module).main(sys.argv[4:])
"""


def command(module: str, sys_path: Sequence[str], *arguments: str) -> list[str]:
    """Return the command that runs ``main(arguments)`` of a module; ``sys_path`` follows Python's own."""
    return [sys.executable, "-c", _CODE, _ROOT, json.dumps(list(sys_path)), module, *arguments]


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of such a process; the module path is an argument."""
    return {name: value for name, value in env.items() if name != "PYTHONPATH"}
