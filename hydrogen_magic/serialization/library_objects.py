"""Objects of libraries that pickle refuses or damages, although they can be restored in another process.

Streams call the ``restore_*`` functions when they are read; the kernel and the ranks have them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from hydrogen_magic.core.library_types import derives_from
from hydrogen_magic.serialization.instances import (
    Reduced,
    find_on_type,
    restore_attributes,
    set_state,
)
from hydrogen_magic.serialization.keras_objects import reduce_keras_object
from hydrogen_magic.serialization.pickling_errors import RefusedError
from hydrogen_magic.serialization.reducers import (
    restore_dead_reference,
    restore_object,
    restore_weak,
)

Handler = Callable[[Any], Any]


def handler_of(kind: type) -> Handler | None:
    """Return the function that reduces objects of class ``kind``; None if pickle does."""
    for module, name, handler in _HANDLERS:
        if derives_from(kind, module, name):
            return handler
    return _reduce_parametrized if _is_parametrized(kind) else None


# ── Python ───────────────────────────────────────────────────────────────────────────────────────

_CONSTANTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (sys, ("version_info", "flags", "float_info", "int_info", "hash_info", "thread_info")),
    (dataclasses, ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")),
)
OF_CONSTANTS: dict[type, Handler] = {
    type(getattr(module, name)): lambda obj, module=module, name=name: (getattr, (module, name))  # type: ignore[misc]  # defaults
    for module, names in _CONSTANTS
    for name in names
    if type(getattr(module, name)).__module__ != "builtins"  # a sentinel of Python 3.15
}
"""Reduces the only objects of their classes: the classes of ``sys`` have no name to be found by, and the
constants of ``dataclasses`` are compared by identity."""


def reduce_weak_proxy(proxy: Any) -> Any:
    """Reduce a weak proxy to one of the same object, not to a copy of it."""
    try:
        referent = proxy.__reduce_ex__.__self__  # a proxy has no name for it
    except ReferenceError:
        raise RefusedError(
            proxy, "it is a weak proxy of an object that is gone", "delete it"
        ) from None
    return restore_weak, (weakref.proxy, referent)


def reduce_weak_reference(reference: weakref.ref[Any]) -> Any:
    """Reduce a weak reference to one of the same object, or of one that is gone."""
    if (referent := reference()) is None:
        return restore_dead_reference, ()
    return restore_weak, (weakref.ref, referent, reference.__callback__)


def reduce_weak_collection(found: Any) -> Any:
    """Reduce a dictionary with weak keys or values, or a weak set, to one of the same objects."""
    items = found if type(found) is weakref.WeakSet else found.items()
    return restore_weak, (type(found), list(items))


def restore_names_of_main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _reduce_namespaces(namespaces: Any) -> Any:
    """Reduce where pydantic looks up the names of annotations: not with all that the notebook has."""
    main = restore_names_of_main()
    names_of_main = Reduced((restore_names_of_main, ()))
    return type(namespaces), tuple(names_of_main if one is main else one for one in namespaces)


def _reduce_exception(error: Any) -> Any:
    """Reduce an exception with its cause, which pickle leaves out."""
    reduced = _reduce_without_cause(error)
    if error.__cause__ is None:
        return reduced
    if reduced is NotImplemented:
        reduced = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    make, args, *rest = reduced
    state = (*rest, None)[0], error.__cause__
    return make, args, state, None, None, restore_with_cause


def restore_with_cause(error: BaseException, state: tuple[Any, BaseException]) -> None:
    """Set the attributes and the cause of an exception."""
    attributes, error.__cause__ = state
    if attributes is not None:
        set_state(error, attributes)


def _reduce_without_cause(error: Any) -> Any:
    """Reduce an exception without a call of its class, whose ``__init__`` may take other arguments."""
    kind = type(error)
    own = find_on_type(kind, "__reduce__"), find_on_type(kind, "__reduce_ex__")
    is_default = not any(isinstance(one, types.FunctionType) for one in own)
    if not (is_default and isinstance(find_on_type(kind, "__init__"), types.FunctionType)):
        return NotImplemented
    reduced = error.__reduce__()
    return (restore_exception, (kind, *reduced[1]), *reduced[2:])


def restore_exception(kind: type[BaseException], *args: Any) -> BaseException:
    """Make an exception with the arguments that Python keeps; the state has its other attributes."""
    error = kind.__new__(kind, *args)
    initial = (vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base))
    next(one for one in initial if not isinstance(one, types.FunctionType))(error, *args)
    return error


def _reduce_of_parser(obj: Any) -> Any:
    """Reduce a parser of arguments, or one of its actions."""
    kind = type(obj)
    if not _is_reduced_as(object, kind):
        return NotImplemented
    suppress = Reduced((getattr, (argparse, "SUPPRESS")))  # parsers compare it by identity
    state = {
        name: suppress if value is argparse.SUPPRESS else value for name, value in vars(obj).items()
    }
    return restore_object, (kind,), state


def _is_reduced_as(base: type, kind: type) -> bool:
    """Whether a subclass of ``base`` does not change what pickle saves."""
    return all(
        find_on_type(kind, name) is find_on_type(base, name)
        for name in ("__getstate__", "__reduce__", "__reduce_ex__")
    )


# ── NumPy ────────────────────────────────────────────────────────────────────────────────────────


def is_array_class(kind: type) -> bool:
    """Whether objects of a class are plain arrays with attributes; NumPy has been imported.

    Not memory maps, whose file is not sent, and not those of a class with its own pickling.
    """
    numpy = sys.modules["numpy"]
    bases = numpy.ndarray, getattr(sys.modules.get("numpy.ma"), "MaskedArray", numpy.ndarray)
    is_default = any(
        _is_reduced_as(base, kind)
        and find_on_type(kind, "__setstate__") is find_on_type(base, "__setstate__")
        for base in bases
    )
    return is_default and not issubclass(kind, numpy.memmap)


def _reduce_subclass(array: Any) -> Any:
    """Reduce an array of a subclass to a plain one and its attributes.

    NumPy would copy its elements into the stream, apart from those of other arrays over the same memory, and
    leave out attributes.
    """
    kind, own_attributes = type(array), getattr(array, "__dict__", {})
    if not is_array_class(kind):
        return NotImplemented
    plain = plain_array(array)
    return restore_subclass, (plain, kind), own_attributes or None, None, None, restore_array_state


def plain_array(array: Any) -> Any:
    """Return a plain array over the memory of one that may be of a subclass."""
    ndarray = sys.modules["numpy"].ndarray
    return ndarray.view(array, ndarray)


def restore_subclass(plain: Any, kind: type) -> Any:
    """Make an array of a subclass over the memory of a plain one."""
    return type(plain).view(plain, kind)


def restore_array_state(array: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of an array, in place of those that its class has set."""
    vars(array).clear()
    vars(array).update(attributes)


# ── torch ────────────────────────────────────────────────────────────────────────────────────────


def _reduce_loader(loader: Any) -> Any:
    """Leave out the iterator that ``persistent_workers`` keeps: its processes are those of this process."""
    kind, base = type(loader), sys.modules["torch.utils.data"].DataLoader
    if loader.__dict__.get("_iterator") is None and not _is_reduced_as(base, kind):
        return NotImplemented
    state: Any = {**loader.__dict__, "_iterator": None}, {}, False
    return restore_object, (kind,), state, None, None, restore_attributes


_DISTRIBUTING = ("accelerate.", "deepspeed.", "torch.distributed.")
"""Libraries whose optimizers hold what belongs to the processes of one gang."""


def _reduce_optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer with all its attributes; torch leaves out hooks, and what subclasses set."""
    kind, base = type(optimizer), sys.modules["torch.optim"].Optimizer
    is_distributing = any(str(one.__module__).startswith(_DISTRIBUTING) for one in kind.__mro__)
    if is_distributing or _is_made_by_library(kind) or not _is_reduced_as(base, kind):
        return NotImplemented
    state = dict(vars(optimizer))
    if hasattr(state.get("step"), "_wrapped_by_lr_sched"):  # in a closure of the scheduler
        state["step"] = Reduced((restore_watched_step, (optimizer,)))
    return restore_object, (kind,), state


def _is_made_by_library(kind: type) -> bool:
    """Whether a library has made the class at run time, around that of the user's optimizer."""
    home = kind.__module__
    return home != "__main__" and getattr(sys.modules.get(home), kind.__name__, None) is not kind


def restore_watched_step(optimizer: Any) -> Any:
    """Wrap the method as torch's schedulers do, which warn where it is not."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **options: Any) -> Any:
        alive: Any = reference()
        alive._opt_called = True
        return type(alive).step(alive, *args, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _is_parametrized(kind: type) -> bool:
    """Whether torch made the class for one parametrized module (spectral_norm, weight_norm, …)."""
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", "") == "torch.nn.utils.parametrize"


def _reduce_parametrized(module: Any) -> Any:
    state = dict(module.__dict__)
    return restore_object, (type(module).__bases__[0],), state, None, None, restore_parametrized


def restore_parametrized(module: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of a module, and give it the class that torch makes for it."""
    from torch.nn.utils import parametrize

    lists = attributes["_modules"].pop("parametrizations")
    module.__dict__.update(attributes)
    parametrize._inject_new_class(module)
    for name in lists:
        parametrize._inject_property(module, name)
    module.parametrizations = lists


def _reduce_limits(limits: Any) -> Any:
    """Reduce the limits of a type of number."""
    return type(limits), (getattr(sys.modules["torch"], limits.dtype),)


def _reduce_loguru_core(core: Any) -> Any:
    """Reduce what all loggers of loguru share to that of the other process, which has its own sinks."""
    is_own = core is sys.modules["loguru"].logger._core
    return (restore_loguru_core, ()) if is_own else NotImplemented


def restore_loguru_core() -> Any:
    """Return what the loggers of loguru share here."""
    return importlib.import_module("loguru").logger._core


def _refuse_custom_operator(operator: Any) -> Any:
    raise RefusedError(
        operator,
        "it is a custom operator of torch, which each process registers",
        "define it inside the cell, with its register_fake and register_autograd, or in a local module",
    )


def _reduce_overload(overload: Any) -> Any:
    """Reduce ``torch.ops.aten.add.Tensor`` to its names."""
    return restore_operator, (*overload._schema.name.split("::"), overload._overloadname)


def _reduce_operator(operator: Any) -> Any:
    return restore_operator, tuple(operator._qualified_op_name.split("::"))


def restore_operator(*names: str) -> Any:
    """Return a namespace of ``torch.ops``, or what it has by these names."""
    found = importlib.import_module("torch").ops
    for name in names:
        found = getattr(found, name)
    return found


def _reduce_script_module(module: Any) -> Any:
    own = dict((*module.named_parameters(), *module.named_buffers()))
    return restore_script, (_saved(module),), own, None, None, restore_script_tensors


def _reduce_script_function(function: Any) -> Any:
    return restore_script, (_saved(function),)


def _saved(script: Any) -> bytes:
    file = io.BytesIO()
    sys.modules["torch"].jit.save(script, file)
    return file.getvalue()


def restore_script(saved: bytes) -> Any:
    """Load TorchScript."""
    import torch

    return torch.jit.load(io.BytesIO(saved))


def restore_script_tensors(module: Any, tensors: dict[str, Any]) -> None:
    """Give a module the tensors that other objects, such as an optimizer, share with it."""
    for path, tensor in tensors.items():
        *parents, name = path.split(".")
        owner = module
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, tensor)


# ── pandas ───────────────────────────────────────────────────────────────────────────────────────


class SharedRefs:
    """Where pandas counts the frames over the memory of a block or index; it is written after that memory.

    Under copy-on-write pandas writes into memory in place if it knows of no other frame over it.
    """

    def __init__(self, refs: Any) -> None:
        self.refs = refs if refs is not None and refs.has_reference() else None


def reduce_block(block: Any) -> Any:
    """Reduce a block of a DataFrame."""
    make, args = block.__reduce__()
    return make, args, SharedRefs(block.refs), None, None, restore_block_refs


def reduce_single_manager(manager: Any) -> Any:
    """Reduce what holds the block of a Series: pandas reduces it without the block itself."""
    make, args, state = manager.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3]
    refs = SharedRefs(manager.blocks[0].refs)
    return make, args, (state, refs), None, None, restore_single_manager


def reduce_index(index: Any) -> Any:
    """Reduce an index, which may be over the memory of a column."""
    make, args, *_ = index.__reduce__()
    refs = SharedRefs(vars(index).get("_references"))  # that of a range cannot be set
    return make, args, refs, None, None, restore_index_refs


def _reduce_backed_array(array: Any) -> Any:
    """Reduce an array of dates without what pandas caches in it when it is only read."""
    make, args, state = array.__reduce__()
    attributes = {name: value for name, value in vars(array).items() if name != "_cache"}
    return make, args, (*state[:2], attributes)


def _reduce_refs(refs: Any) -> Any:
    return type(refs), ()


def restore_block_refs(block: Any, refs: Any) -> None:
    """Count a block among those over the same memory."""
    if refs is not None:
        block.refs = refs
        refs.add_reference(block)


def restore_single_manager(manager: Any, state: tuple[Any, Any]) -> None:
    """Give the manager of a Series its state, and count its block."""
    manager.__setstate__(state[0])
    restore_block_refs(manager.blocks[0], state[1])


def restore_index_refs(index: Any, refs: Any) -> None:
    """Count an index among the frames over the same memory."""
    if refs is not None:
        index._references = refs
        refs.add_index_reference(index)


def copies_on_write() -> bool:
    """Whether no write into a frame of pandas is seen in another one."""
    pandas = sys.modules["pandas"]
    is_optional = int(pandas.__version__.partition(".")[0]) < 3
    return not is_optional or pandas.options.mode.copy_on_write is True


# ── Spark ────────────────────────────────────────────────────────────────────────────────────────


class BroadcastValue:
    """Stands for a broadcast variable, which Spark loads for the functions that it pickles itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _reduce_broadcast(variable: Any) -> Any:
    return BroadcastValue, (variable.value,)


# ── JAX ──────────────────────────────────────────────────────────────────────────────────────────


def is_jax_array(kind: type) -> bool:
    """Whether ``kind`` is the class of arrays of JAX, or of its keys of random numbers."""
    return derives_from(kind, "jax", "Array")


def values_of_jax_array(array: Any) -> Any:
    """Return a NumPy array with the values. Raises RefusedError for objects without values here."""
    import jax
    import numpy

    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        why = "it is a typed key of random numbers, which only JAX's backend can hold"
        raise RefusedError(
            array,
            why,
            "use jax.random.key_data(key) and jax.random.wrap_key_data(), or create the object with the key"
            " inside the cell",
        )
    if not (array.is_fully_addressable or array.is_fully_replicated):
        why = "it is sharded over the ranks, and every rank holds only a part of it"
        remedy = (
            "call jax.experimental.multihost_utils.process_allgather(x, tiled=True) on all ranks"
        )
        raise RefusedError(array, why, f"{remedy}, and bring back its result")
    return numpy.asarray(array)


def restore_read_only(values: Any) -> Any:
    """Make a NumPy array that cannot be changed."""
    values.flags.writeable = False
    return values


_stand_ins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Arrays of this process that stand for one of JAX, by ``id``."""


def restore_stand_in(values: Any) -> Any:
    """Make the read-only NumPy array that stands for a jax.Array on a rank."""
    array = _stand_ins[id(values)] = restore_read_only(values)
    return array


def reduce_stand_in(array: Any) -> Any:
    """Reduce a NumPy array to the jax.Array for which it stands; NotImplemented: it stands for none."""
    is_one = not array.flags.writeable and _stand_ins.get(id(array)) is array
    return (restore_jax_array, (array[...],)) if is_one else NotImplemented


def _reduce_jitted(function: Any) -> Any:
    """Reduce a function of ``jax.jit`` with its attributes: without them it has no name, nor ``lower``."""
    make, args, state, *_ = function.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make, args, (state, vars(function)), None, None, restore_jitted


def restore_jitted(function: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Give a function of ``jax.jit`` what it calls, and its attributes."""
    function.__setstate__(state[0])
    vars(function).update(state[1])


def _reduce_tf_function(function: Any) -> Any:
    """Reduce a ``tf.function`` as it was before its first call: it is traced again where it is read.

    Otherwise a call would change it, which a session takes for a change by the user.
    """
    make, args, state, *_ = function.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    fresh = function._clone(None).__getstate__()
    named = ("__", "_tf_decorator")  # what the decorator has copied from the function
    kept = {name: value for name, value in state.items() if name.startswith(named)}
    return make, args, {**kept, **fresh}


def _reduce_jax_array(array: Any) -> Any:
    return restore_jax_array, (values_of_jax_array(array),)


def restore_jax_array(values: Any) -> Any:
    """Make a jax.Array where JAX runs on the CPU; elsewhere return the NumPy array itself.

    With an accelerator, JAX would reserve most of its memory in a process that may not need it.
    """
    try:
        import jax
    except ImportError:
        return values
    is_same = jax.dtypes.canonicalize_dtype(values.dtype) == values.dtype  # jax_enable_x64
    return jax.numpy.asarray(values) if is_same and _uses_cpu(jax.config.jax_platforms) else values


def _uses_cpu(platforms: str | None) -> bool:
    """Whether JAX uses the CPU by default; asking JAX itself would start its backend."""
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


_TF_FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
_HANDLERS: tuple[tuple[str, str, Handler], ...] = (
    ("argparse", "Action", _reduce_of_parser),
    ("argparse", "_ActionsContainer", _reduce_of_parser),
    ("builtins", "BaseException", _reduce_exception),
    ("jax", "Array", _reduce_jax_array),
    ("jaxlib._jax", "PjitFunction", _reduce_jitted),
    ("keras.src.saving.keras_saveable", "KerasSaveable", reduce_keras_object),
    ("pandas.core.internals.blocks", "Block", reduce_block),
    ("pandas.core.internals.managers", "SingleBlockManager", reduce_single_manager),
    ("pandas._libs.arrays", "NDArrayBacked", _reduce_backed_array),
    ("pandas._libs.internals", "BlockValuesRefs", _reduce_refs),
    ("pandas", "Index", reduce_index),
    ("loguru._logger", "Core", _reduce_loguru_core),
    ("numpy", "ndarray", _reduce_subclass),
    ("pydantic._internal._namespace_utils", "NamespacesTuple", _reduce_namespaces),
    ("pyspark.core.broadcast", "Broadcast", _reduce_broadcast),
    (_TF_FUNCTION, "Function", _reduce_tf_function),
    ("torch._library.custom_ops", "CustomOpDef", _refuse_custom_operator),
    ("struct", "Struct", lambda form: (type(form), (form.format,))),
    ("torch._ops", "OpOverload", _reduce_overload),
    ("torch._ops", "OpOverloadPacket", _reduce_operator),
    ("torch._ops", "_OpNamespace", lambda namespace: (restore_operator, (namespace.name,))),
    ("torch", "finfo", _reduce_limits),
    ("torch", "iinfo", _reduce_limits),
    ("torch.optim", "Optimizer", _reduce_optimizer),
    ("torch.utils.data", "DataLoader", _reduce_loader),
    ("torch.jit", "ScriptModule", _reduce_script_module),
    ("torch.jit", "ScriptFunction", _reduce_script_function),
)


# ── hooks of tensors ─────────────────────────────────────────────────────────────────────────────

_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def with_hooks(tensor: Any, reduced: Any) -> Any:
    """Return how a tensor is reduced with its hooks, which torch leaves out.

    ``reduced``: how it is reduced without them; NotImplemented: as torch does.
    """
    hooks = {
        register: list((getattr(tensor, place, None) or {}).values())
        for place, register in _HOOKS.items()
    }
    if not any(hooks.values()):
        return reduced
    make, args = reduce_tensor(tensor) if reduced is NotImplemented else reduced
    return make, args, hooks, None, None, restore_hooks


def reduce_tensor(tensor: Any) -> tuple[Any, Any]:
    """Reduce a tensor as torch does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it leaves hooks out
        make, args = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make, args


_restored_hooks: dict[int, list[Any]] = {}
"""Handles of the hooks that a tensor was sent with, by its id; those of one that is gone remove nothing."""


def restore_hooks(tensor: Any, hooks: dict[str, list[Any]]) -> None:
    """Register the hooks of a tensor, in place of those with which it was sent before."""
    for handle in _restored_hooks.pop(id(tensor), ()):
        handle.remove()
    _restored_hooks[id(tensor)] = [
        getattr(tensor, register)(function)
        for register, functions in hooks.items()
        for function in functions
    ]
