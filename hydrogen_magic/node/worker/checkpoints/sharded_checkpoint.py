"""Checkpoints of sharded states: every rank writes and reads its own parts.

It uses ``torch.distributed.checkpoint`` (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)
on all ranks. The parts become the checkpoint when all of them are on disk: rank 0 then renames the file
that names their directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.checkpoints import checkpoint_files
from hydrogen_magic.node.worker.results import rank_parts


def is_sharded(state: Any) -> bool:
    """Return whether a tensor in ``state`` (dicts, lists, tuples) has parts on several ranks."""
    kinds = rank_parts.sharded_classes()
    return bool(kinds) and any(isinstance(leaf, kinds) for leaf in _leaves(state))


def _leaves(state: Any) -> Iterator[Any]:
    """Yield what the dicts, lists and tuples in ``state`` contain."""
    todo, seen = [state], set()
    while todo:
        item = todo.pop()
        if not isinstance(item, (dict, list, tuple)):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            todo.extend(item.values() if isinstance(item, dict) else item)


def save(state: Any, folder: Path) -> None:
    """Write every rank's parts of ``state``; called by all ranks. Raises errors found by rank 0."""
    if not isinstance(state, dict):
        raise TypeError(
            f"hm.checkpoint.save() got a {type(state).__name__} with sharded tensors: pass a dict "
            'with names, such as {"model": state_dict}'
        )
    _on_rank_0(lambda: rank_parts.refuse_parts(state, _pickled_tensors(state)))
    made = folder / _on_rank_0(lambda: checkpoint_files.new_parts(folder).name)
    try:
        _write_parts(state, made)
        problem = _on_rank_0(lambda: _problem_of_commit(made))
    except BaseException:
        # An interrupt too, which may come to another rank just before rank 0 commits.
        if api.rank() == 0:
            _discard(made)
        raise
    if problem is not None:
        _discard(made)  # on all ranks: their folders may not be the same
        raise problem


def _pickled_tensors(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the tensors of which rank 0's are saved: all but the sharded ones that torch finds."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.stateful import Stateful

    # Of objects with a state_dict(), such as optimizers, torch saves that.
    others = {key: item for key, item in state.items() if not isinstance(item, Stateful)}
    values = flatten_state_dict(others)[0].values()  # a tuple may be one of them
    kinds = rank_parts.sharded_classes()
    return checkpoint_files.tensors_in([each for each in values if not isinstance(each, kinds)])


def _problem_of_commit(made: Path) -> Exception | None:
    try:
        _commit(made)
    except (OSError, RuntimeError) as error:
        return error
    return None


def _discard(made: Path) -> None:
    """Remove parts that have not become the checkpoint."""
    if checkpoint_files.parts(made.parent) != made:
        shutil.rmtree(made, ignore_errors=True)


def _write_parts(state: dict[str, Any], made: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        checkpoint.save(state, checkpoint_id=made)
    except CheckpointException as error:
        cause, said = _first_failure(error)
        if isinstance(cause, OSError):
            raise checkpoint_files.cannot_write(made.parent, cause) from error
        raise RuntimeError(f"the sharded state was not saved: {said}") from error


def _first_failure(error: Any) -> tuple[BaseException, str]:
    """Return the error of any rank on all ranks, also as text."""
    rank, (cause, _) = min(error.failures.items())
    return cause, f"rank {rank}: {type(cause).__name__}: {cause}"


def _commit(made: Path) -> None:
    """Make the parts the checkpoint, if rank 0 sees all of them."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(made).read_metadata()
    written = {info.relative_path for info in metadata.storage_data.values()}
    missing = [name for name in sorted(written) if not (made / name).exists()]
    if missing:
        raise RuntimeError(
            f"{made.parent} is not the same folder on all hosts: rank 0 does not see {missing[0]} "
            "there, which another rank wrote; pass hm.checkpoint.save() a folder that all hosts "
            "share"
        )
    checkpoint_files.commit_parts(made)


def _on_rank_0(action: Callable[[], Any]) -> Any:
    """Do something on rank 0 and return its value on all ranks, or raise its error on all."""
    import torch.distributed as dist

    answer: list[Any] = [None, None]
    if api.rank() == 0:
        try:
            answer[0] = action()
        except Exception as error:  # of any kind: the others wait for an answer
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def load(parts: Path, into: dict[str, Any]) -> dict[str, Any]:
    """Fill ``into`` from ``parts``; called by all ranks. Returns it."""
    if not isinstance(into, dict):
        raise TypeError(
            f"hm.checkpoint.load(into=…) got a {type(into).__name__}: pass a dict like the saved one, "
            'such as {"model": model.state_dict()}'
        )
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        checkpoint.load(into, checkpoint_id=parts)
    except CheckpointException as error:
        said = _first_failure(error)[1]
        message = f"the checkpoint {parts} does not match the state passed as into=: {said}"
        raise ValueError(message) from error
    return into
