"""Identity of the notebook's objects: results update them in place.

A cell without ``%%distributed`` changes the notebook's model in place, and the notebook's optimizer
stays attached to it. Results behave the same way: every module, tensor, optimizer, scheduler and
array that an ``--out`` variable refers to gets a number when it is captured. The number stays with
the object on the rank. If the object is part of a result, the notebook's object receives the new
contents, and references to it in the results become references to the notebook's object.

    kernel              rank                                        kernel
    Originals.number ─► restore_original, updating(RankObjects) ─► restore_original, updating(Originals)

In a session, later cells update the objects of the ranks in the same way: everything that a cell sends is
numbered, and a rank keeps the numbers of its objects from cell to cell. What a rank has made gets its number
when the notebook has its copy: the next cell brings the paths to such objects.
"""

from __future__ import annotations

import copyreg
import operator
import pickle
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from hydrogen_magic.serialization.instances import own_attributes, restore_object, set_state
from hydrogen_magic.serialization.library_objects.numpy_arrays import is_array_class, plain_array

_KINDS = (
    ("torch.nn", "Module"),
    ("torch", "Tensor"),
    ("torch.optim", "Optimizer"),
    ("torch.optim.lr_scheduler", "LRScheduler"),
)
_NEVER_SENT = {"_compiled_call_impl"}
"""Attributes that torch's modules leave out of their state."""


class ObjectIdentity:
    """Equal for the same object, without keeping it alive."""

    def __init__(self, obj: Any) -> None:
        self._id = id(obj)
        # None for a list or a number: the source of a cell shows whether it assigns the name.
        try:
            self._reference: weakref.ref[Any] | None = weakref.ref(obj)
        except TypeError:
            self._reference = None

    def __eq__(self, other: object) -> bool:
        is_alive = self._reference is None or self._reference() is not None
        return isinstance(other, ObjectIdentity) and is_alive and self._id == other._id

    def __hash__(self) -> int:
        return self._id


class Originals:
    """Numbers the notebook's objects without keeping them alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._numbers: dict[int, int] = {}
        self.definitions: set[ObjectIdentity] = set()
        """Functions and classes of a session's names and values, also after they were defined again."""
        self.extended: set[ObjectIdentity] = set()
        """Of these, earlier ones that the present one of the same name contains: ``class Net(Net)``."""
        self.of_ranks: set[ObjectIdentity] = set()
        """Copies of classes that a session's ranks have defined."""

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return len(self._references)

    def number(self, obj: Any) -> int | None:
        """Return the number of ``obj``; None for kinds that are not updated in place."""
        if not is_kind(obj):
            return None
        known = self._numbers.get(id(obj))
        if known is None or self.get(known) is not obj:  # another object had the id before
            known = self._numbers[id(obj)] = len(self._references)
            self._references.append(weakref.ref(obj))
        return known

    def get(self, number: int) -> Any:
        """Return the object of this number, None if the notebook no longer has it."""
        return self._references[number]() if 0 <= number < len(self._references) else None


def is_kind(obj: Any) -> bool:
    """Whether it is of a kind that is updated in place."""
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in _KINDS)
    return is_array(obj) or issubclass(type(obj), tuple(kind for kind in kinds if kind is not None))


def is_array(obj: Any) -> bool:
    """Whether it is an array; not a memory map, since writing to it would change its file."""
    kind, ndarray = type(obj), getattr(sys.modules.get("numpy"), "ndarray", ())
    return kind is ndarray or (issubclass(kind, ndarray) and is_array_class(kind))


def numbered(number: int, obj: Any, reduced: Any) -> Any:
    """Return how ``obj`` is reduced, with :func:`restore_original` to make it.

    ``reduced``: the value that a pickler's ``reducer_override`` returned for it.
    """
    if reduced is NotImplemented:
        # NumPy makes an array with gaps empty, and fills it later.
        has_gaps = is_array(obj) and not (obj.flags.forc or obj.dtype.hasobject)
        whole = obj.copy() if has_gaps else obj
        reduced = whole.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *rest = reduced
    state, items, pairs, setter = (*rest, None, None, None, None)[:4]
    if not (make in _MAKES_EMPTY or _is_whole_at_once(obj)):
        return reduced
    if state is not None and setter is not None:
        state, setter = (setter, state), restore_state_by
    elif state is not None:
        setter = restore_state
    return restore_original, (number, make, args), state, items, pairs, setter


_MAKES_EMPTY = (copyreg.__newobj__, restore_object)  # type: ignore[attr-defined]  # typeshed lacks it
"""Functions that leave all contents to the state. Another one, which a class names in ``__reduce__``, may put
contents into the object that it makes, and an existing object would not get them."""


def _is_whole_at_once(obj: Any) -> bool:
    """Whether it has its contents when it is made, and an existing one can take them."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return is_array(obj) or _is_tensor(obj) or isinstance(obj, compiled)


# ── on a rank ────────────────────────────────────────────────────────────────────────────────────


class RankObjects:
    """A rank's copies of the notebook's objects, by number."""

    def __init__(self, objects: MutableMapping[int, Any]) -> None:
        """``objects``: an empty dictionary for them; one that is weak lets them go."""
        self._objects = objects

    def get(self, number: int) -> Any:
        """Return the object of this number, None if the rank no longer has it."""
        return self._objects.get(number)

    def add(self, number: int, obj: Any) -> None:
        """Keep the number of ``obj``."""
        self._objects[number] = obj

    def match(self, found: Mapping[int, Any]) -> None:
        """Give objects of the rank, by number, the numbers of the notebook's copies of them."""
        earlier = {id(obj): number for number, obj in self._objects.items()}
        for number, obj in found.items():
            if number not in self._objects and is_kind(obj):
                self.forget(earlier.get(id(obj), number))  # the notebook has made another object
                self.add(number, obj)

    def forget(self, number: int) -> None:
        """Let the next object of this number be another one."""
        self._objects.pop(number, None)

    def numbered(self) -> dict[int, tuple[int, Any]]:
        """Return ``id -> (number, object)``."""
        return {id(obj): (number, obj) for number, obj in self._objects.items()}


# ── objects that are updated ─────────────────────────────────────────────────────────────────────

_thread = threading.local()


class _Updates:
    """Existing objects that take the contents of what is unpickled, each as soon as it has been made.

    Code of the user's classes runs meanwhile, and must see them. An exception undoes it all; the memory of
    tensors, which others may share, is written at the end only.
    """

    def __init__(
        self, originals: Originals | RankObjects, undo: ExitStack, before: Callable[[], object]
    ) -> None:
        self._originals = originals
        self._undo = undo
        self._before = before
        self._updated: dict[int, Any] = {}
        """Existing objects that have new contents, by id."""
        self._tensors: list[tuple[Any, Any, Any]] = []
        """Of these the tensors, with their own memory, and what they have got."""
        self._hooks: list[tuple[dict[str, Any], str, dict[Any, Any]]] = []
        """Attributes of existing objects with their name, and the hooks that they had under it."""
        self._kept: dict[int, Any] = {}
        """Existing objects that keep their contents, by id."""
        self._is_keeping = False

    def keep(self, is_keeping: bool) -> None:
        """Let existing objects keep their contents from now on, or update them again."""
        self._is_keeping = is_keeping

    def target(self, number: int, new: Any) -> Any:
        """Return the existing object for ``new``, or ``new`` if there is none like it.

        One that keeps its contents need not be like ``new``.
        """
        old = self._originals.get(number)
        if old is not None and self._is_keeping:
            self._kept[id(old)] = old
            return old
        if old is None or type(old) is not type(new) or not _fits(old, new):
            if isinstance(self._originals, RankObjects):
                if old is not None:
                    self._undo.callback(self._originals.add, number, old)
                self._originals.add(number, new)
            return new
        if not self._updated:
            self._before()
        self._updated[id(old)] = old
        attributes = own_attributes(old)
        self._undo.callback(attributes.update, dict(attributes))  # after the next one
        self._undo.callback(attributes.clear)
        self._hooks += (
            (attributes, name, hooks)
            for name, hooks in attributes.items()
            if "_hooks" in name and isinstance(hooks, OrderedDict)  # handles refer to it weakly
        )
        if is_array(old):
            memory = plain_array(old)
            self._undo.callback(memory.__setitem__, ..., memory.copy())
            memory[...] = plain_array(new)
        elif _is_tensor(old) and not _is_lazy(old):
            self._take_tensor(old, new)
        return old

    def _take_tensor(self, old: Any, new: Any) -> None:
        """Let ``old`` use the memory of ``new``."""
        own, grad = old.data, old.grad if old.is_leaf else None
        self._undo.callback(_set_tensor, old, own, old.requires_grad, grad)
        self._tensors.append((old, own, new))
        _set_tensor(old, new.detach().to(old.device), new.requires_grad)
        vars(old).update(vars(new))

    def is_updated(self, obj: Any) -> bool:
        """Whether it is an existing object that has new contents."""
        return id(obj) in self._updated

    def is_kept(self, obj: Any) -> bool:
        """Whether an object keeps its contents."""
        return id(obj) in self._kept

    def set_state(self, obj: Any, state: Any) -> None:
        """Set the state of an object, unless it keeps its own."""
        if self.is_kept(obj):
            return
        if self.is_updated(obj):
            _drop_deleted(obj, state)
        set_state(obj, state)

    def commit(self) -> None:
        """Copy the new contents of tensors into their own memory, where they fit."""
        fitting = [
            (own.data_ptr(), *one) for one in self._tensors if _fits_memory(own := one[1], one[2])
        ]
        end = shift = 0
        for start, old, own, new in sorted(fitting, key=operator.itemgetter(0)):
            if start < end and new.data_ptr() - start != shift:
                continue  # it shared memory with the one before, and does not any more
            end, shift = max(end, start + _extent(own)), new.data_ptr() - start
            old.data = own
            # The outputs of chunk() and similar functions refuse to be written while they have a graph.
            (old.detach() if old.is_leaf else own).copy_(new)
        self._keep_hooks()

    def _keep_hooks(self) -> None:
        """Keep the notebook's own dicts of hooks, with the new contents: its handles remove hooks from them.

        Not where a handle that has come back refers to the new one.
        """
        for attributes, name, own in self._hooks:
            new = attributes.get(name)
            if type(new) is type(own) and new is not own and not weakref.getweakrefcount(new):
                own.clear()
                own.update(new)
                attributes[name] = own


@contextmanager
def updating(
    originals: Originals | RankObjects, before: Callable[[], object] = lambda: None
) -> Iterator[_Updates]:
    """Update existing objects by what this thread unpickles meanwhile; an exception undoes it.

    ``before``: called before the first one is updated.
    """
    with ExitStack() as undo:
        updates = _thread.updates = _Updates(originals, undo, before)
        try:
            yield updates
        finally:
            _thread.updates = None
        updates.commit()
        undo.pop_all()


def restore_original(number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make an object, or return the existing object of this number."""
    new = make(*args)
    updates: _Updates | None = getattr(_thread, "updates", None)
    return new if updates is None else updates.target(number, new)


def restore_state(obj: Any, state: Any) -> None:
    """Set the state of an object that has just been made, or of an existing one."""
    updates: _Updates | None = getattr(_thread, "updates", None)
    if updates is None:
        set_state(obj, state)
    else:
        updates.set_state(obj, state)


def restore_state_by(obj: Any, state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    """Set the state of an object by the function of its reducer, unless the object keeps its own."""
    setter, contents = state
    updates: _Updates | None = getattr(_thread, "updates", None)
    if updates is None or not updates.is_kept(obj):
        setter(obj, contents)


def _drop_deleted(obj: Any, state: Any) -> None:
    """Delete attributes that the rank has deleted, if the state contains all attributes."""
    module = getattr(sys.modules.get("torch.nn"), "Module", object)
    complete = (getattr(kind, "__getstate__", None) for kind in (object, module))
    if isinstance(state, dict) and getattr(type(obj), "__getstate__", None) in complete:
        for name in vars(obj).keys() - state.keys() - _NEVER_SENT:
            del vars(obj)[name]


def _fits(old: Any, new: Any) -> bool:
    """Whether ``old`` can take the contents of ``new``."""
    if is_array(old):
        same = old.shape == new.shape and old.dtype == new.dtype and not old.dtype.hasobject
        return bool(same and old.flags.writeable)
    if not _is_tensor(old) or _is_lazy(old):
        return True
    same_kind = all(getattr(old, kind) == getattr(new, kind) for kind in _KINDS_OF_MEMORY)
    may_change = old.is_leaf or old.dtype == new.dtype
    return same_kind and may_change and _can_change(old) and _can_change(new)


_KINDS_OF_MEMORY = ("layout", "is_meta", "is_quantized")
"""Attributes of tensors that cannot be changed."""


def _can_change(tensor: Any) -> bool:
    """Whether torch can replace the memory of a tensor, and that is all that it has.

    Jagged and masked tensors, for example, consist of others.
    """
    torch = sys.modules["torch"]
    is_plain = tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_nested
    has_own_operations = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return is_plain and not has_own_operations and not tensor.is_inference()


def _is_tensor(obj: Any) -> bool:
    return isinstance(obj, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_lazy(tensor: Any) -> bool:
    """Whether it is a parameter or buffer of unknown shape (lazy)."""
    return hasattr(tensor, "materialize")


def _set_tensor(tensor: Any, data: Any, requires_grad: bool, grad: Any = None) -> None:
    """Give a tensor other memory. Gradients are not sent."""
    if not tensor.is_leaf:
        tensor.data = data
        return
    tensor.grad = None
    if not requires_grad:
        tensor.requires_grad_(False)  # before: integers have no gradients
    tensor.data = data
    tensor.requires_grad_(requires_grad)
    tensor.grad = grad


def _fits_memory(own: Any, new: Any) -> bool:
    """Whether the memory of a tensor can hold the contents of ``new``."""
    torch = sys.modules["torch"]
    is_plain = own.layout is torch.strided and not own.is_quantized
    same = is_plain and own.shape == new.shape and own.dtype == new.dtype
    return bool(same and torch._debug_has_internal_overlap(own) != 1)


def _extent(tensor: Any) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.element_size() * (1 + sum((size - 1) * step for size, step in steps)))
