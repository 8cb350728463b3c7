"""Partial unpickling, for pickles whose classes or functions fail in this process."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from hydrogen_magic.serialization.pickling_errors import find_path

__all__ = ["MissingObject", "TolerantUnpickler"]


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
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reasons: list[str] = []
        """Why objects of the current section could not be restored."""
        self._distrusted: set[int] = set()

    def distrust(self, indexes: Iterable[int]) -> None:
        """Remember memo objects that may contain a :class:`MissingObject`: no names and classes."""
        plain = (str, bytes, type, types.FunctionType, types.BuiltinFunctionType)
        objects = (self.memo[index] for index in indexes)
        self._distrusted.update(id(obj) for obj in objects if not isinstance(obj, plain))

    def recall(self, obj: Any) -> None:
        """Note that ``obj`` of an earlier section is used again."""
        if id(obj) in self._distrusted and find_path("", obj, _is_not_sent) is not None:
            self.reasons.append("it shares objects with another result that cannot be opened")

    def lose(self, made: Any, error: BaseException) -> MissingObject:
        """Return the replacement for an object that ``made``, a class or function, failed to restore."""
        if isinstance(made, MissingObject):  # the cause has already been reported
            return made
        reason = _reason(error)
        self.reasons.append(reason)
        is_maker = issubclass(type(made), (type, types.FunctionType, types.BuiltinFunctionType))
        named = made if is_maker else type(made)
        lost = MissingObject(made if type(made) is str else named.__qualname__, reason)
        for index, known in self.memo.items():
            if known is made and not is_maker:  # an object without its state
                self.memo[index] = lost
        return lost


def _is_not_sent(obj: Any) -> bool:
    return isinstance(obj, MissingObject)


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ fails, too
        return type(error).__name__


def _making(n_arguments: int, load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard an opcode that replaces the last ``n_arguments`` of the stack with an object."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        depth = len(unpickler.stack) - n_arguments
        made = unpickler.stack[depth]
        try:
            load(unpickler)
        except (Exception, SystemExit) as error:
            unpickler.stack[depth:] = [unpickler.lose(made, error)]

    return guarded


def _filling(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard an opcode that adds items to the container at the end of the stack."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        try:
            load(unpickler)
        except (Exception, SystemExit) as error:
            unpickler.stack[-1] = unpickler.lose(unpickler.stack[-1], error)

    return guarded


def _recalling(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard an opcode that takes an object from the memo."""

    def guarded(unpickler: TolerantUnpickler) -> None:
        load(unpickler)
        unpickler.recall(unpickler.stack[-1])

    return guarded


def _guard_opcodes() -> dict[int, Callable[[Any], None]]:
    """Return the unpickler's dispatch table; in protocol 5, only these opcodes run foreign code."""
    table: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
    making = {pickle.REDUCE: 2, pickle.NEWOBJ: 2, pickle.STACK_GLOBAL: 2, pickle.BUILD: 2}
    for opcode, n_arguments in {**making, pickle.NEWOBJ_EX: 3}.items():
        table[opcode[0]] = _making(n_arguments, table[opcode[0]])
    for opcode in (pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS):
        table[opcode[0]] = _filling(table[opcode[0]])
    for opcode in (pickle.BINGET, pickle.LONG_BINGET):
        table[opcode[0]] = _recalling(table[opcode[0]])
    return table


TolerantUnpickler.dispatch = _guard_opcodes()
