"""Single classes of other libraries: loguru, pydantic, Spark, TensorFlow."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

from hydrogen_magic.serialization.instances import Reduced
from hydrogen_magic.serialization.library_objects.handlers import Handlers


def _reduce_loguru_core(core: Any) -> Any:
    """Reduce what all loggers of loguru share to that of the other process, which has its own sinks."""
    is_own = core is sys.modules["loguru"].logger._core
    return (restore_loguru_core, ()) if is_own else NotImplemented


def restore_loguru_core() -> Any:
    """Return what the loggers of loguru share here."""
    return importlib.import_module("loguru").logger._core


def restore_names_of_main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _reduce_namespaces(namespaces: Any) -> Any:
    """Reduce where pydantic looks up the names of annotations: not with all that the notebook has."""
    main = restore_names_of_main()
    names_of_main = Reduced((restore_names_of_main, ()))
    return type(namespaces), tuple(names_of_main if one is main else one for one in namespaces)


class BroadcastValue:
    """Stands for a broadcast variable, which Spark loads for the functions that it pickles itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _reduce_broadcast(variable: Any) -> Any:
    return BroadcastValue, (variable.value,)


def _reduce_tf_function(function: Any) -> Any:
    """Reduce a ``tf.function`` as it was before its first call: it is traced again where it is read.

    Otherwise a call would change it, which a session takes for a change by the user.
    """
    make, args, state, *_ = function.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    fresh = function._clone(None).__getstate__()
    named = ("__", "_tf_decorator")  # what the decorator has copied from the function
    kept = {name: value for name, value in state.items() if name.startswith(named)}
    return make, args, {**kept, **fresh}


_TF_FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function"


HANDLERS: Handlers = (
    ("loguru._logger", "Core", _reduce_loguru_core),
    ("pydantic._internal._namespace_utils", "NamespacesTuple", _reduce_namespaces),
    ("pyspark.core.broadcast", "Broadcast", _reduce_broadcast),
    (_TF_FUNCTION, "Function", _reduce_tf_function),
)
