"""Observer of collectives: shows in which one a rank is when a gang hangs.

While recording, collectives are spans of their own track. A call with ``async_op=True`` returns at once:
its span covers the call, and another one the wait for its result.

DDP reduces gradients in C++, outside of this observer: only the stack shows that.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from hydrogen_magic.core.events import COLLECTIVES
from hydrogen_magic.node.rendezvous import torch_address, torch_groups
from hydrogen_magic.node.worker.observe.span_recording import put
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

NAMES = (
    "init_process_group",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)
"""Functions that can wait for other ranks."""
_RELEASE_S = 0.01
"""Time in which Gloo's threads release finished work."""


def attach(module: ModuleType) -> None:
    """Wrap the collectives of ``torch.distributed.distributed_c10d`` and of modules that re-export them."""
    torch = module.torch  # only partly imported: nothing of it may be used yet
    replace = functools.partial(put, module, "torch.distributed")
    for name in NAMES:
        original = getattr(module, name, None)
        if original is None:
            continue  # older versions of torch lack some of them
        is_joining = name == "init_process_group"
        call = _noted(original) if is_joining else original
        joins_all = functools.partial(_joins_all, original) if is_joining else None
        tracked = tracked_collective(name, call, torch, is_joining=is_joining, joins_all=joins_all)
        replace(name, tracked)
    torch_groups.attach(module)
    torch_address.let_children_meet_apart()
    rendezvous = torch_address.at_any_store(module.rendezvous)
    module.rendezvous = torch_groups.with_new_keys(rendezvous)  # type: ignore[attr-defined]
    for name in ("isend", "irecv"):
        replace(name, torch_groups.pairwise(getattr(module, name), torch))
    replace("destroy_process_group", _tracked_destroy(module.destroy_process_group))
    module.Work.wait = _recorded_wait(torch, module.Work.wait)


def _noted(init: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(init).bind_partial(*args, **kwargs).arguments
        torch_groups.note_arguments(given)
        _warn_of_rank(given)
        is_of_all = _joins_all(init, *args, **kwargs)
        with _explained(), _init_barrier() if is_of_all else nullcontext():
            init(*args, **kwargs)
        torch_groups.note_joined()

    return init_process_group


def _joins_all(init: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether ``init_process_group`` with these arguments waits for all ranks of the gang."""
    given = inspect.signature(init).bind_partial(*args, **kwargs).arguments
    n_ranks = given.get("world_size", -1)
    n_ranks = os.environ.get("WORLD_SIZE", "") if n_ranks in (None, -1) else n_ranks
    is_whole = str(n_ranks) == str(torch_address.gang_size())
    has_url = given.get("store") is None and given.get("init_method") in (None, "env://")
    return is_whole and has_url and torch_address.is_gangs_store()


def _warn_of_rank(given: Mapping[str, Any]) -> None:
    """Warn if ``init_process_group`` joins all ranks, and this one with the number of another."""
    reporter, rank = _reporter.current(), given.get("rank", -1)
    of_all = str(given.get("world_size")) == os.environ.get("WORLD_SIZE")
    if reporter is not None and of_all and rank not in (-1, reporter.rank):
        reporter.notice(
            "warning",
            f"called init_process_group(rank={rank}); if two ranks join with the same number, all wait until"
            " the timeout: call it without rank",
        )


@contextmanager
def _explained() -> Iterator[None]:
    """Explain an error of ``init_process_group`` about a missing ``MASTER_ADDR``.

    torch asks for it in a gang that has another rendezvous.
    """
    try:
        yield
    except ValueError as error:
        reporter = _reporter.current()
        if reporter is None or "MASTER_ADDR" not in str(error) or "MASTER_ADDR" in os.environ:
            raise
        exchanges = reporter.exchanges
        raise ValueError(
            "init_process_group() finds no torch rendezvous in a gang launched `--with "
            f"{exchanges.rendezvous}`: launch the gang `--with torch`, or "
            f"{exchanges.join_advice or 'join the ranks with that library'}"
        ) from error


@contextmanager
def _init_barrier() -> Iterator[None]:
    """Have a rank leave ``init_process_group`` when all have joined, unless the user has set torch's switch.

    Without it a cell that only joins can fail: Gloo connects each rank to each other one, and a rank that
    is through and exits closes connections that others still wait for.
    The switch holds for ``new_group`` too, where it would add a wait for ranks that do not call it.
    """
    name = "TORCH_DIST_INIT_BARRIER"
    is_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)


def tracked_collective(
    name: str,
    original: Callable[..., Any],
    torch: Any = None,
    *,
    is_joining: bool = False,
    joins_all: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """Return ``original``, noted as the collective ``name`` while it runs.

    ``torch``: given if torch.compile may trace the function. ``is_joining``: ranks join or leave by it.
    ``joins_all``: returns for its arguments whether the rank joins all ranks of its gang by it.
    """

    def enters(reporter: _reporter.Reporter, label: str, *args: Any, **kwargs: Any) -> bool:
        is_of_all = joins_all is not None and joins_all(*args, **kwargs)
        return reporter.collectives.enter(label, is_joining=is_joining, joins_all=is_of_all)

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # Under torch.compile, the compiler can only replace the original.
        is_compiling = torch is not None and torch.compiler.is_compiling()
        reporter = None if is_compiling else _reporter.current()
        label = f"{name} (async)" if kwargs.get("async_op") else name
        if reporter is None or not enters(reporter, label, *args, **kwargs):
            return original(*args, **kwargs)
        if not is_joining:
            reporter.exchanges.add_call()
        try:
            return original(*args, **kwargs)
        finally:
            left = reporter.collectives.leave()
            if reporter.is_recording and left is not None:
                reporter.span(left.name, left.start_ns, reporter.now_ns(), 0, COLLECTIVES)

    return collective


def _tracked_destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        reporter = _reporter.current()
        if reporter is not None:
            reporter.exchanges.keep_counts()
        try:
            return original(*args, **kwargs)
        finally:
            # Gloo's thread still holds the last work, and with it a Python object of torch's backward
            # (`torch/autograd/graph.py`, "context"). If the user's next statement frees the process
            # group, its destructor waits for that thread with the GIL held: a deadlock of torch 2.13.
            time.sleep(_RELEASE_S)

    return destroy_process_group


def _recorded_wait(torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        reporter = None if torch.compiler.is_compiling() else _reporter.current()
        # Most collectives wait themselves: that is part of their own span.
        if (
            reporter is None
            or not reporter.is_recording
            or reporter.collectives.current is not None
        ):
            return original(*args, **kwargs)
        start_ns = reporter.now_ns()
        try:
            return original(*args, **kwargs)
        finally:
            reporter.span("wait", start_ns, reporter.now_ns(), 0, COLLECTIVES)

    return wait
