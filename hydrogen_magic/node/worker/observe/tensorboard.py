"""Observer of scalars for TensorBoard, which become curves.

``SummaryWriter`` of torch or tensorboardX, and ``tf.summary.scalar``, write them.

The writer still writes its files. Two writers with one tag, as of ``runs/train`` and ``runs/val``, make two
curves: the first has the tag's name, the other has the name of its directory as prefix. Scalars in a
``tf.function`` are not seen, since that is only traced.
"""

from __future__ import annotations

import os
import sys
import weakref
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers

NO_CURVE = "hp_metric"
"""Tag of a placeholder, always -1, that Lightning writes beside hyperparameters."""

_directories = helpers.for_each_gang(dict[str, str])
"""Curve -> directory of the first writer that wrote it."""
_directory_of: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Of writers of TensorFlow, which do not know it."""
_WRITERS = "tensorflow.python.ops.summary_ops_v2"


def attach(module: ModuleType) -> None:
    """Patch ``SummaryWriter``; ``module`` is ``writer`` of torch.utils.tensorboard or tensorboardX."""
    writer = module.SummaryWriter
    writer.add_scalar = helpers.seen(writer.add_scalar, _see_scalar)
    writer.add_scalars = helpers.seen(writer.add_scalars, _see_scalars)
    # Results of a whole run: it also writes them as scalars, in a separate directory.
    writer.add_hparams = helpers.claiming(writer.add_hparams)


def attach_to_tensorflow(module: ModuleType) -> None:
    """Patch ``tf.summary.scalar``; ``module`` is ``tensorboard.plugins.scalar.summary_v2``."""
    module.scalar = helpers.followed(module.scalar, _see_summary)  # type: ignore[attr-defined]


def attach_to_tensorflow_writers(module: ModuleType) -> None:
    """Patch ``tf.summary.create_file_writer``; ``module`` is ``tensorflow.python.ops.summary_ops_v2``."""
    create = module.create_file_writer_v2
    module.create_file_writer_v2 = helpers.followed(create, _note_directory)  # type: ignore[attr-defined]


def _note_directory(writer: Any, /, logdir: Any, *_: Any, **__: Any) -> None:
    _directory_of[writer] = os.fsdecode(logdir)


@helpers.safely
def _see_scalar(
    writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
) -> None:
    if tag != NO_CURVE:
        helpers.log({_curve(writer, str(tag)): scalar_value}, global_step)


@helpers.safely
def _see_scalars(
    writer: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any
) -> None:
    values = {_curve(writer, f"{main_tag}/{tag}"): one for tag, one in tag_scalar_dict.items()}
    helpers.log(values, global_step)


@helpers.safely
def _see_summary(
    is_written: Any, name: Any, data: Any, step: Any = None, *_: Any, **__: Any
) -> None:
    import tensorflow as tf

    if helpers.is_claimed() or not tf.executing_eagerly() or not bool(is_written):
        return
    writer = getattr(sys.modules[_WRITERS], "_summary_state").writer  # noqa: B009 # it has no type
    scope = tf.get_current_name_scope()
    tag = f"{scope}/{name}" if scope else str(name)
    at = tf.summary.experimental.get_step() if step is None else step
    helpers.log({_curve_in(_directory_of.get(writer, ""), tag): data}, at)


def _curve(writer: Any, tag: str) -> str:
    return _curve_in(str(getattr(writer, "log_dir", None) or getattr(writer, "logdir", "")), tag)


def _curve_in(directory: str, tag: str) -> str:
    if _directories().setdefault(tag, directory) == directory:
        return tag
    return f"{os.path.basename(os.path.normpath(directory))}/{tag}"
