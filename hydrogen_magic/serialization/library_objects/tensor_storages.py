"""The memory of torch's tensors, and tensors that torch makes over it."""

from __future__ import annotations

from typing import Any

from hydrogen_magic.core.rank_gpu import gpu_of_rank


def restore_storage(buffer: Any, offset: int, nbytes: int, device: str) -> Any:
    """Make a torch storage over a part of ``buffer``, without a copy unless it goes to a GPU."""
    import torch

    if nbytes == 0:
        storage = torch.UntypedStorage(0)
    else:
        part = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)
        storage = part.untyped_storage()
    if device == "cuda":
        return storage.to(device=torch.device(gpu_of_rank()))
    return storage


def restore_typed_storage(untyped: Any, dtype: Any) -> Any:
    """Make the typed view of a storage that torch's own reducers expect."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def restore_tensor(storage: Any, *args: Any) -> Any:
    """Make a tensor with torch's own function, which accepts only the typed view of a storage."""
    import torch

    typed = getattr(storage, "_untyped_storage", storage)
    return torch._utils._rebuild_tensor_v3(restore_typed_storage(typed, torch.uint8), *args)
