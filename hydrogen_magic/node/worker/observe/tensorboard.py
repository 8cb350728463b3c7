"""Observer of ``SummaryWriter``, of torch or tensorboardX: scalars become curves.

The writer still writes its files. Two writers with one tag, as of ``runs/train`` and ``runs/val``, make two
curves: the first has the tag's name, the other has the name of its directory as prefix.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import metrics

_NO_CURVE = "hp_metric"
"""Tag of a placeholder, always -1, that Lightning writes beside hyperparameters."""

_directories: dict[str, str] = {}
"""Curve -> directory of the first writer that wrote it."""


def attach(module: ModuleType) -> None:
    """Patch ``SummaryWriter``; ``module`` is ``writer`` of torch.utils.tensorboard or tensorboardX."""
    writer = module.SummaryWriter
    writer.add_scalar = _seen(writer.add_scalar, _see_scalar)
    writer.add_scalars = _seen(writer.add_scalars, _see_scalars)
    # Results of a whole run: it also writes them as scalars, in a separate directory.
    writer.add_hparams = metrics.claiming(writer.add_hparams)


def _seen(original: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not metrics.is_claimed():
            see(*args, **kwargs)
        return result

    return add


@metrics.safely
def _see_scalar(
    writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
) -> None:
    if tag != _NO_CURVE:
        metrics.log({_curve(writer, str(tag)): scalar_value}, global_step)


@metrics.safely
def _see_scalars(
    writer: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any
) -> None:
    values = {_curve(writer, f"{main_tag}/{tag}"): one for tag, one in tag_scalar_dict.items()}
    metrics.log(values, global_step)


def _curve(writer: Any, tag: str) -> str:
    directory = str(getattr(writer, "log_dir", None) or getattr(writer, "logdir", ""))
    if _directories.setdefault(tag, directory) == directory:
        return tag
    return f"{os.path.basename(os.path.normpath(directory))}/{tag}"
