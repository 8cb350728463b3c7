"""Messages between processes: what is sent arrives, and what is malformed is refused by name."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import messages
from hydrogen_magic.core.messages import (
    AgentCommand,
    ClosureLabel,
    FilePart,
    KillRanks,
    Message,
    MessageError,
    RankFile,
    ResultPart,
    ServiceStart,
    TaskMessage,
    WorkerReport,
    decode,
    encode,
)
from hydrogen_magic.core.validation import kinds_of
from hydrogen_magic.node.agent import host_task
from hydrogen_magic.node.spark import barrier_task

MESSAGES = kinds_of(Message)
DEPENDENT = {"display": (0, 2)}
"""Values of fields that are valid only with those of others."""


def example(declared: Any) -> Any:
    """Return a value of a declared type."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if is_dataclass(declared):
        hints = typing.get_type_hints(declared)
        values = {name: DEPENDENT.get(name) or example(hint) for name, hint in hints.items()}
        return declared(**values)
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0])
    if origin is tuple:
        return (example(arguments[0]),) * 2
    if origin is not None and issubclass(origin, Mapping):
        return {"name": example(arguments[1])}
    plain: dict[Any, Any] = {
        str: "text",
        int: 3,
        float: 1.5,
        bool: True,
        object: ["any", {"json": 1}],
    }
    return plain[declared]


def arrived(message: Message) -> Message:
    return decode(json.loads(json.dumps(encode(message))), Message)


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_every_message_arrives_as_it_was_sent(kind: str) -> None:
    message = example(MESSAGES[kind])
    assert arrived(message) == message


@pytest.mark.parametrize("content", typing.get_args(messages.FileContent))
def test_a_file_arrives_with_its_kind_of_content(content: type[Any]) -> None:
    part = FilePart(RankFile("cafe", 0, 1, example(content)), 1, 10, 0)
    assert arrived(part) == part
    assert arrived(FilePart(ClosureLabel("cafe"), 1, 10, 0)) != part


def test_only_declared_optional_fields_may_be_missing() -> None:
    assert decode(["KillRanks", {"gang": "cafe"}], AgentCommand) == KillRanks("cafe", None)
    assert decode(["ResultPart", {"name": "model"}], WorkerReport) == ResultPart("model")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"do": "stop"}, "expected a message [kind, fields], got dict"),
        (["StopRanks"], "expected a message"),
        ([3, {}], "expected a message"),
        (["FormatDisk", {}], "expected a kind of AgentCommand, got 'FormatDisk'"),
        (["RanksCommand" * 50, {}], "got 'RanksCommandRanks"),
        (["Pong", {}], "expected a kind of AgentCommand, got 'Pong'"),
        (["StopRanks", {}], "StopRanks: .*missing 1 required .*'gang'"),
        (["StopRanks", {"gang": 3}], "StopRanks.gang should be .*str.*, got int"),
        (
            ["StopRanks", {"gang": "cafe", "rank": 1}],
            "StopRanks should be a dict with fields of Stop",
        ),
        (["StopRanks", ["cafe"]], "StopRanks should be a dict with fields"),
        (["RecordSpans", {"gang": "cafe", "on": 1}], "RecordSpans.on should be .*bool.*, got int"),
        (["ProfileSteps", {"gang": "", "number": 10**99, "steps": 1}], "number does not fit"),
    ],
)
def test_malformed_messages_are_refused_by_name(raw: Any, said: str) -> None:
    with pytest.raises(MessageError, match=said.replace("[", r"\[") if "[" in said else said):
        decode(raw, AgentCommand)


def test_values_of_secrets_are_not_printed() -> None:
    launch, start = example(MESSAGES["LaunchRequest"]), example(ServiceStart)
    assert "secrets=" not in repr(launch) and "env=" not in repr((launch, start))
    assert "secret=" not in repr(example(MESSAGES["LocalAgentConfig"]))


def test_a_task_on_a_host_writes_the_json_of_its_messages() -> None:
    """It runs without this package, from its text."""
    text = Path(host_task.__file__).read_text()
    kinds = set(re.findall(r'"((?:Task|Agent|Remote)[A-Z][A-Za-z]+)"', text))
    some = {"TaskHello", "TaskPing", "AgentBusy", "RemoteAgentConfig"}
    assert some <= kinds <= set(MESSAGES)
    gpus = {"gpu": SimpleNamespace(addresses=["0"])}
    context = SimpleNamespace(partitionId=lambda: 0, resources=lambda: gpus)
    sent = {"gang": "cafe", "attempt": 0, "token": "t", "owner": "me", "record_dir": "/nowhere"}
    plain = decode(["TaskHello", host_task._about(sent, {"number": 1})], TaskMessage)
    assert isinstance(plain, messages.TaskHello) and plain.parent_pid is None
    about = host_task._about(sent, barrier_task._about(context, host_task.read))
    hello = decode(["TaskHello", about], TaskMessage)
    assert isinstance(hello, messages.TaskHello)
    assert (hello.kind, hello.gpus) == ("Spark task", ("0",))
