"""Timeouts of torch's process groups while a cell runs that may ask the user, for which peers wait."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.import_hooks import hooks

_PATIENCE = timedelta(days=1, seconds=1)
"""A time that no user has chosen. Since torch 2.15 groups have whole seconds."""
_MODULE = "torch.distributed.distributed_c10d"
_DEFAULTS = ("default_pg_timeout", "default_pg_nccl_timeout")


class PeerTimeouts:
    """A day for the groups that exist, and by default for those to come, until :meth:`restore`."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], timedelta] = {}
        """Of the groups, by name and device."""
        self._defaults: dict[str, timedelta] = {}
        self._is_over = False

    def extend(self) -> None:
        """Let ranks wait; also if torch is imported later."""
        hooks.add(_MODULE, self._extend)

    def _extend(self, module: ModuleType) -> None:
        if self._is_over:  # torch is imported by a later cell of the session
            return
        for name in _DEFAULTS:
            default = getattr(module, name, None)
            if isinstance(default, timedelta):
                self._defaults[name] = default
                setattr(module, name, _PATIENCE)
        for key, backend in _backends(module):
            self._before[key] = backend.options._timeout
            backend._set_default_timeout(_PATIENCE)

    def restore(self) -> None:
        """Undo that. Groups that were created meanwhile get torch's default."""
        self._is_over = True
        module = sys.modules.get(_MODULE)
        if module is None:
            return
        for name, default in self._defaults.items():
            setattr(module, name, default)
        for key, backend in _backends(module):
            if backend.options._timeout == _PATIENCE:
                backend._set_default_timeout(self._before.get(key) or self._default(backend))

    def _default(self, backend: Any) -> timedelta:
        is_nccl = "NCCL" in type(backend).__name__ and _DEFAULTS[1] in self._defaults
        return self._defaults[_DEFAULTS[is_nccl]]


def _backends(module: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the backends of all groups whose timeout can be changed, by name and device."""
    for group, name in dict(getattr(getattr(module, "_world", None), "pg_names", {})).items():
        for device in getattr(group, "_device_types", ()):
            with suppress(AttributeError, RuntimeError):  # all of this is private
                backend = group._get_backend(device)
                if backend._set_default_timeout and backend.options._timeout:
                    yield (name, str(device)), backend
