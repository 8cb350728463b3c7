"""Partial unpickling, for pickles whose classes or functions fail in this process."""

from __future__ import annotations

import pickle
import types
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hydrogen_magic.serialization.object_paths import find_path


@dataclass(frozen=True)
class MissingObject:
    """Stands in a partial result for an object that could not be pickled or restored."""

    type: str
    reason: str


class TolerantUnpickler(pickle._Unpickler):
    """Inserts a :class:`MissingObject` where an object cannot be restored, and continues.

    The standard library's unpickler in Python is slow, but its stack and memo can be repaired.
    """

    memo: dict[int, Any]
    stack: list[Any]
    read: Callable[[int], bytes]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reasons: list[str] = []
        """Why objects of the current section could not be made."""
        self.failed_call: tuple[MissingObject | None, Any] = None, ()
        """What stands for the result of the last call that failed, and its arguments."""
        self._starts: list[int] = []
        """For each section the index of its first object in the memo."""
        self._lossy: set[int] = set()
        """Sections with objects that could not be made."""
        self._recalled: set[int] = set()
        """Indexes in the memo of objects of earlier sections that the current one uses."""

    def begin_section(self) -> None:
        """Mark objects that are loaded from now on as part of the next section."""
        if self.reasons:
            self._lossy.add(len(self._starts) - 1)
        self._starts.append(len(self.memo))
        self.reasons.clear()
        self._recalled.clear()

    def recall(self, index: int) -> None:
        """Note that the object of this index is used again."""
        obj = self.memo[index]
        is_shared = index < self._starts[-1] and index not in self._recalled
        if not is_shared or issubclass(type(obj), _PLAIN):
            return
        self._recalled.add(index)
        section = bisect_right(self._starts, index) - 1
        if section in self._lossy and find_path("", obj, _is_not_sent) is not None:
            self.reasons.append("it shares objects with another result that cannot be opened")

    def lose(self, made: Any, error: BaseException) -> MissingObject:
        """Return the replacement for an object that ``made``, a class or function, failed to restore."""
        if type(made) is MissingObject:  # the cause has already been reported
            return made
        reason = _reason(error)
        self.reasons.append(reason)
        is_maker = issubclass(type(made), (type, types.FunctionType, types.BuiltinFunctionType))
        named = made if is_maker else type(made)
        lost = MissingObject(made if type(made) is str else named.__qualname__, reason)
        # An object without its state. A string is the name of a module, to which other objects refer, too.
        if not is_maker and type(made) is not str:
            self.replace(made, lost)
        return lost

    def replace(self, obj: Any, lost: MissingObject) -> None:
        """Have later references to ``obj`` refer to ``lost``."""
        for index, known in self.memo.items():
            if known is obj:
                self.memo[index] = lost


_PLAIN = (str, bytes, type, types.FunctionType, types.BuiltinFunctionType)


def _is_not_sent(obj: Any) -> bool:
    return type(obj) is MissingObject  # isinstance() asks for obj.__class__, which may fail


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ fails, too
        return type(error).__name__


def _making(n_arguments: int, load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard an opcode that replaces the last ``n_arguments`` of the stack with an object."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        depth = len(unpickler.stack) - n_arguments
        made, arguments = unpickler.stack[depth : depth + 2]
        try:
            load(unpickler)
        except (Exception, SystemExit) as error:
            lost = unpickler.lose(made, error)
            unpickler.stack[depth:] = [lost]
            unpickler.failed_call = lost, arguments

    return guarded


def _dropping(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard the opcode that drops a result: that of a function that sets the state of an object."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        *_, obj, result = (None, None, *unpickler.stack[-2:])
        load(unpickler)
        lost, arguments = unpickler.failed_call
        if lost is None or result is not lost or type(arguments) is not tuple:
            return
        if obj is next(iter(arguments), lost):
            unpickler.replace(obj, lost)
            unpickler.stack[-1] = lost

    return guarded


def _filling(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard an opcode that adds items to the container at the end of the stack."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        try:
            load(unpickler)
        except (Exception, SystemExit) as error:
            unpickler.stack[-1] = unpickler.lose(unpickler.stack[-1], error)

    return guarded


def _adding(what: Any, load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard an opcode that adds an object, made of no other on the stack, or of those after a mark."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        try:
            load(unpickler)
        except (Exception, SystemExit) as error:
            unpickler.stack.append(unpickler.lose(what, error))

    return guarded


def _recalling(read_index: Callable[[TolerantUnpickler], int]) -> Callable[[Any], None]:
    """Return an opcode that takes an object from the memo."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        index = read_index(unpickler)
        unpickler.recall(index)
        unpickler.stack.append(unpickler.memo[index])

    return guarded


def _guard_opcodes() -> dict[int, Callable[[Any], None]]:
    """Return the unpickler's dispatch table; in protocol 5, only these opcodes run foreign code."""
    table: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
    making = {pickle.REDUCE: 2, pickle.NEWOBJ: 2, pickle.STACK_GLOBAL: 2, pickle.BUILD: 2}
    for opcode, n_arguments in {**making, pickle.NEWOBJ_EX: 3}.items():
        table[opcode[0]] = _making(n_arguments, table[opcode[0]])
    for opcode in (pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS):
        table[opcode[0]] = _filling(table[opcode[0]])
    table[pickle.FROZENSET[0]] = _adding(frozenset, table[pickle.FROZENSET[0]])
    for opcode in (pickle.EXT1, pickle.EXT2, pickle.EXT4):  # of copyreg.add_extension()
        table[opcode[0]] = _adding("extension", table[opcode[0]])
    table[pickle.POP[0]] = _dropping(table[pickle.POP[0]])
    table[pickle.BINGET[0]] = _recalling(lambda unpickler: unpickler.read(1)[0])
    table[pickle.LONG_BINGET[0]] = _recalling(
        lambda unpickler: int.from_bytes(unpickler.read(4), "little")
    )
    return table


TolerantUnpickler.dispatch = _guard_opcodes()
