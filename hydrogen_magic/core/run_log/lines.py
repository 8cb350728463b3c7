"""The lines of a record: one event each."""

from __future__ import annotations

import json

from hydrogen_magic.core import events as ev


def is_recorded(event: ev.Event) -> bool:
    """Return whether records have such events: all but displays, which the notebook keeps."""
    return not isinstance(event, ev.Display)


_as_json = json.JSONEncoder(separators=(",", ":")).encode


def encoded(event: ev.Event) -> bytes:
    """Return the line of ``event``, with its end."""
    return _as_json(ev.encode(event)).encode() + b"\n"


def decoded(line: bytes, gang_id: str) -> ev.Event:
    """Return the event of a line. Raises ``MessageError`` if it is damaged, or of a newer version."""
    try:
        return ev.decode(json.loads(line))
    except ValueError as error:  # MessageError is one
        raise ev.MessageError(
            f"the record of run {gang_id!r} is damaged, or of a newer version: {error}"
        ) from error
