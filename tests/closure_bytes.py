"""How many bytes of closures leave this kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hydrogen_magic.core.messages import ClosureLabel, FilePart, Message
from hydrogen_magic.transport.channel import Blob, Hub


@contextmanager
def counted() -> Iterator[list[int]]:
    """Give a list that gets the size of each part of a closure that is sent meanwhile."""
    sent: list[int] = []
    send = Hub.send

    def counting(hub: Hub, key: str, message: Message, blob: Blob | None = None) -> None:
        if isinstance(message, FilePart) and isinstance(message.label, ClosureLabel):
            assert blob is not None
            sent.append(len(blob))
        send(hub, key, message, blob)

    with mock.patch.object(Hub, "send", counting):
        yield sent
