"""Frames, series and indexes of pandas, with the memory that they share."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from hydrogen_magic.serialization.library_objects.handlers import Handlers


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


HANDLERS: Handlers = (
    ("pandas", "Index", reduce_index),
    ("pandas._libs.arrays", "NDArrayBacked", _reduce_backed_array),
    ("pandas._libs.internals", "BlockValuesRefs", _reduce_refs),
    ("pandas.core.internals.blocks", "Block", reduce_block),
    ("pandas.core.internals.managers", "SingleBlockManager", reduce_single_manager),
)
