"""What is shown of a rank's stacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import hydrogen_magic
from hydrogen_magic.node.agent.stacks import StackReader

OURS = Path(hydrogen_magic.__file__).parent


def shown(*frames: str) -> Sequence[str]:
    """Return the frames that are shown of these, the innermost first."""
    fd = os.memfd_create("stacks")
    try:
        reader = StackReader(fd)
        lines = (f'  File "{frame}", line 7 in f' for frame in frames)
        os.write(fd, "\n".join(("Current thread (most recent call first):", *lines)).encode())
        return [line.split('"')[1] for line in reader.read().splitlines()[1:]]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("users", "below"),
    [
        (("<cell 7>",), ("node/worker/namespace.py", "node/worker/main.py")),
        (
            ("<cell 7>", "/site-packages/cloudpickle/cloudpickle.py"),
            (
                "serialization/result_stream.py",
                "node/worker/results/results.py",
                "node/worker/main.py",
            ),
        ),
        (
            ("/site-packages/torch/distributed/tensor/_api.py",),
            (
                "node/worker/results/unsharding.py",
                "node/worker/results/results.py",
                "node/worker/main.py",
            ),
        ),
    ],
    ids=["running", "packing", "gathering"],
)
def test_our_frames_are_not_shown(users: Sequence[str], below: Sequence[str]) -> None:
    hook = f"{OURS}/node/rendezvous/torch_groups.py <importlib._bootstrap>"
    assert shown(hook, *users, *(f"{OURS}/{file}" for file in below)) == list(users)
