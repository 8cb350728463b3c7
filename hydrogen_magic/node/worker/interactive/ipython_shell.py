"""``get_ipython()`` on a rank: shell lines by the standard library, other magics by IPython."""

from __future__ import annotations

import builtins
import os
import re
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.node.worker import standard_streams
from hydrogen_magic.node.worker.interactive.display_functions import display
from hydrogen_magic.node.worker.nesting import refuse_nested

_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_OF_FRONT_END = ("gui", "matplotlib")
"""Magics that choose how the notebook's page shows figures; a rank has no page."""
_OF_LINES = ("fields", "grep", "nlstr", "p", "paths", "spstr")
"""Other attributes of IPython's list of lines."""


class ShellLines(list[str]):
    """The lines that a command has printed, with the attributes of IPython's list for them."""

    @property
    def n(self) -> str:
        """The lines joined by newlines."""
        return "\n".join(self)

    @property
    def s(self) -> str:
        """The lines joined by spaces."""
        return " ".join(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("l", "list"):
            return self
        if name not in _OF_LINES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        from IPython.utils.text import SList  # slow to import

        lines: Any = SList
        return getattr(lines(self), name)


class RankShell:
    """The object that transformed ``!`` and ``%`` lines call."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.user_ns = namespace
        self.bound: dict[str, Any] = {}
        """What IPython has bound in the namespace by itself: ``In``, ``exit``, ``_`` and others."""
        self._ipython: Any = None
        self._last_folder = ""
        """Where ``%cd -`` leads."""

    def system(self, command: str) -> None:
        """Run ``!command``; its output goes to the rank's own streams."""
        standard_streams.flush()
        done = subprocess.run(self.var_expand(command), shell=True, executable=_shell())
        self.user_ns["_exit_code"] = done.returncode

    def getoutput(self, command: str, split: bool = True) -> Any:
        """Return the output of ``x = !command`` as :class:`ShellLines`, or as one string."""
        done = subprocess.run(
            self.var_expand(command),
            shell=True,
            executable=_shell(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.user_ns["_exit_code"] = done.returncode
        return ShellLines(done.stdout.splitlines()) if split else done.stdout

    def var_expand(self, command: str) -> str:
        """Replace ``{expression}`` and ``$name``, as IPython does; ``{{`` and ``$$`` stay single."""
        return _VARIABLE.sub(self._variable, self._braces(command))

    def _braces(self, command: str) -> str:
        try:
            pieces = list(string.Formatter().parse(command))
        except ValueError:  # braces of the shell itself
            return command
        expanded = ""
        for literal, expression, spec, conversion in pieces:
            expanded += literal
            if expression is not None:
                tail = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                expanded += self._evaluated(expression, "{" + expression + tail + "}", spec or "")
        return expanded

    def _evaluated(self, expression: str, text: str, spec: str) -> str:
        try:
            return format(eval(expression, self.user_ns), spec)
        except Exception:  # not Python, or not for us: the shell gets the text unchanged
            return text

    def _variable(self, match: re.Match[str]) -> str:
        escaped, braced, plain = match.groups()
        name = braced or plain
        if escaped:
            return "$"
        return str(self.user_ns[name]) if name in self.user_ns else match.group(0)

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run ``%name line``."""
        if name == "cd":
            self._change_folder(self.var_expand(line).strip().removeprefix("-q ").strip(" \"'"))
            return None
        if name in _OF_FRONT_END:
            return None
        _refuse_ours(name)
        # The cell's own frame is one further up for IPython, which looks up variables there.
        return self._real(name).run_line_magic(name, line, _stack_depth + 1)

    def _change_folder(self, folder: str) -> None:
        left = self._last_folder
        if folder == "-" and not left:
            raise ValueError("%cd -: no %cd has run before; write %cd FOLDER")
        with suppress(OSError):  # it may have been deleted
            left = os.getcwd()
        os.chdir(self._last_folder if folder == "-" else os.path.expanduser(folder or "~"))
        self._last_folder = left

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        """Run a ``%%name`` cell."""
        _refuse_ours(name)
        return self._real(name).run_cell_magic(name, line, cell)

    def _real(self, name: str) -> Any:
        if self._ipython is None:
            before = dict(self.user_ns)
            self._ipython = _make_ipython(name, self.user_ns)
            for each in before.keys() - _PROVIDED:  # %who shows what the shell has not begun with
                self._ipython.user_ns_hidden.pop(each, None)
            now = self.user_ns.items()
            self.bound = {n: v for n, v in now if n not in before or before[n] is not v}
            # The cell's magics come here, which treats some in its own way.
            provided = {each: before[each] for each in _PROVIDED & before.keys()}
            self.user_ns.update(provided)
            self._ipython.user_ns_hidden.update(provided)
        return self._ipython

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(name), name)


_PROVIDED = {"get_ipython", "display"}
_shells: dict[int, RankShell] = {}


def get_ipython() -> RankShell:
    """Return the shell of this rank's ``__main__``."""
    namespace = sys.modules["__main__"].__dict__
    shell = _shells.get(id(namespace))
    if shell is None:
        shell = _shells[id(namespace)] = RankShell(namespace)
    return shell


def bound_by_ipython(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the names that IPython has bound in ``namespace`` for its own use, and their values."""
    shell = _shells.get(id(namespace))
    return {} if shell is None else shell.bound


def _refuse_ours(name: str) -> None:
    """Refuse magics that start gangs; IPython on the rank does not have them."""
    if name in ("distributed", "gang", "infer"):
        refuse_nested()


def _shell() -> str | None:
    return os.environ.get("SHELL") or None


def _make_ipython(name: str, namespace: dict[str, Any]) -> Any:
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError as error:
        raise HydrogenError(
            f"%{name} needs IPython, which is not installed where this rank runs: pip install ipython"
        ) from error
    make: Any = InteractiveShell
    shell = make(user_module=sys.modules["__main__"], user_ns=namespace)
    # ``name?`` would start a pager.
    shell.set_hook("show_in_pager", lambda self, data, start, screen_lines: print(_plain(data)))
    return shell


def _plain(data: Any) -> str:
    return str(data["text/plain"] if isinstance(data, dict) else data)


def provide(names: Sequence[str], namespace: dict[str, Any], *, own_process: bool) -> None:
    """Add the names to ``namespace`` that IPython provides for a cell, and ``display`` to local modules.

    A rank inside the kernel displays as the kernel does.
    """
    if own_process:
        # As IPython does. Not get_ipython: libraries such as pandas take it for a notebook's front end.
        vars(builtins)["display"] = display
    every = {"get_ipython": get_ipython, "display": display if own_process else _notebooks_display}
    namespace.update({name: every[name] for name in names})


def _notebooks_display(*objects: Any, **options: Any) -> Any:
    from IPython.display import display

    show: Any = display
    return show(*objects, **options)
