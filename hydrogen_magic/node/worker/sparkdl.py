"""``import sparkdl`` without sparkdl: its modules, based on :mod:`hydrogen_magic.compat`.

A variable makes the ranks do the same as the notebook.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "HYDROGEN_MAGIC_SPARKDL"
_MODULES = {
    "sparkdl": ("HorovodRunner",),
    "sparkdl.horovod": ("log_to_driver",),
    "sparkdl.horovod.runner_base": ("HorovodRunner",),
    "sparkdl.horovod.tensorflow": (),
    "sparkdl.horovod.tensorflow.keras": ("LogCallback",),
}
"""Module -> names that notebooks import from it."""
_REPLACED = {
    "sparkdl.estimators": "use hydrogen_magic.spark.TorchEstimator in place of HorovodEstimator",
    "sparkdl.xgboost": "use SparkXGBClassifier or SparkXGBRegressor of xgboost.spark",
}
"""Modules of sparkdl that are refused -> what to use instead."""


def install() -> None:
    """Redirect ``import sparkdl`` to this package, in this notebook and on its ranks.

    ``HorovodRunner``, ``log_to_driver`` and ``LogCallback`` are found at their places in sparkdl, even if
    the original is installed.
    """
    os.environ[VARIABLE] = "1"
    install_if_asked()


def install_if_asked() -> None:
    """Redirect sparkdl's modules if the environment asks for it. A second call has no effect."""
    if VARIABLE not in os.environ or any(
        isinstance(each, _SparkdlFinder) for each in sys.meta_path
    ):
        return
    for name in [name for name in list(sys.modules) if name.partition(".")[0] == "sparkdl"]:
        del sys.modules[name]  # the original
    sys.meta_path.insert(0, _SparkdlFinder())


class _SparkdlFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _REPLACED:
            message = f"{fullname} is not supported: {_REPLACED[fullname]}"
            raise ModuleNotFoundError(message, name=fullname)
        known = fullname in _MODULES
        return ModuleSpec(fullname, _Loader(), is_package=True) if known else None


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        compat = importlib.import_module("hydrogen_magic.compat")
        for name in _MODULES[module.__name__]:
            setattr(module, name, getattr(compat, name))
