"""Models, layers and optimizers of Keras, with the classes and functions of the notebook that they name.

Keras pickles them as its own archives, whose configuration refers to custom objects by name. A process that
has not executed their definitions does not find them.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydrogen_magic.serialization.instances import find_on_type
from hydrogen_magic.serialization.library_objects.handlers import Handlers
from hydrogen_magic.serialization.pickling_errors import RefusedError

_CONFIG = "config.json"
"""Of an archive."""
_UNUSED_OPTIMIZER = (
    r"Skipping variable loading for optimizer .* the saved optimizer has 2 variables"
)
"""Keras warns so of a compiled model that was not fitted: these are in its configuration, too."""


def reduce_keras_object(obj: Any) -> Any:
    """Reduce an object of Keras to its archive and its custom objects; NotImplemented if it says how."""
    saveable = sys.modules["keras.src.saving.keras_saveable"].KerasSaveable
    if find_on_type(type(obj), "__reduce__") is not vars(saveable)["__reduce__"]:
        return NotImplemented
    for part in _layers_of(obj):
        _check_config(part)
    make, (archive,) = obj.__reduce__()
    with zipfile.ZipFile(archive) as file:
        config = json.loads(file.read(_CONFIG))
    parts = {part.__name__: part for part in _parts_of(obj)}
    found = {name: _custom_object(name, parts) for name in _names_in(config)}
    custom = {name: value for name, value in found.items() if value is not None}
    return restore_keras_object, (make, archive, custom)


def restore_keras_object(
    make: Callable[[Any], Any], archive: Any, custom: Mapping[str, Any]
) -> Any:
    """Make an object of Keras of its archive."""
    import keras

    with keras.saving.custom_object_scope(dict(custom)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _UNUSED_OPTIMIZER)
        return make(archive)


def _names_in(config: Any) -> Iterator[str]:
    """Yield the names under which Keras looks for custom classes and functions."""
    if isinstance(config, list):
        for part in config:
            yield from _names_in(part)
    elif isinstance(config, dict):
        kind = config.get("class_name")
        if kind == "function":
            yield str(config.get("config"))
        elif kind is not None and config.get("module", "") is None:
            yield str(config.get("registered_name") or kind)
        yield from _names_in([*config.values()])


def _parts_of(obj: Any) -> Iterator[Any]:
    """Yield the classes and functions of the notebook in a model and its layers.

    The notebook may have other ones of these names by now.
    """
    for each in _layers_of(obj):
        yield from filter(_is_custom, (type(each), *vars(each).values()))


def _layers_of(obj: Any) -> list[Any]:
    """Return a model and its layers, also those of its layers."""
    return [*obj._flatten_layers()] if hasattr(obj, "_flatten_layers") else [obj]


def _check_config(part: Any) -> None:
    """Raise RefusedError for a layer or model of the notebook that Keras saves, but cannot load."""
    makes = find_on_type(type(part), "from_config")
    if not _is_custom(type(part)) or _is_custom(getattr(makes, "__func__", None)):
        return
    config = part.get_config()
    try:
        if "layers" not in config:  # those of a functional model are no arguments
            inspect.signature(type(part)).bind(**config)
    except TypeError as error:
        raise RefusedError(
            part,
            f"Keras cannot create it again from its get_config(): {error}",
            "let __init__ accept **kwargs, pass these to super().__init__ and return its own arguments from"
            " get_config, or build it inside the cell and send its get_weights()",
        ) from None


def _custom_object(name: str, parts: Mapping[str, Any]) -> Any:
    """Return the class or function of ``__main__`` of that name, None if there is none."""
    import keras

    short = name.rpartition(">")[2]  # without the name of a package
    main = vars(sys.modules["__main__"])
    found = (parts.get(short), keras.saving.get_registered_object(name), main.get(short))
    return next(filter(_is_custom, found), None)


def _is_custom(value: Any) -> bool:
    is_code = isinstance(value, (type, types.FunctionType))
    return is_code and value.__module__ == "__main__"


HANDLERS: Handlers = (("keras.src.saving.keras_saveable", "KerasSaveable", reduce_keras_object),)
