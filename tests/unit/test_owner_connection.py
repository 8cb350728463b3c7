"""The kernel's side of the connection to a gang that outlives it, when the owner has exited."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.core.messages import Attach, Attached, Control, OwnerEvents
from hydrogen_magic.driver import kernel_end, known_gangs, launcher
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.owner import connection, process, recorded_gang, server, start
from hydrogen_magic.driver.owner.connection import AttachedGang, OwnerConnection
from hydrogen_magic.driver.state import stored_results
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.serialization import payload
from hydrogen_magic.transport import framing
from tests.fake_gang import FakeGang
from tests.records import DEAD, ENDED, METRICS, launched, write


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a wait that goes on after agents have had their time."""
    monkeypatch.setattr(connection, "_RECORD_S", -1.0)
    clock = SimpleNamespace(
        monotonic=time.monotonic, time=time.time, sleep=lambda _: pytest.fail("waits")
    )
    for module in (connection, recorded_gang, stored_results):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """No record can be finished; returns the gangs for which that was tried."""
    tried: list[list[str]] = []
    monkeypatch.setattr(kernel_end, "end_abandoned", tried.append)
    return tried


def followed(*events: ev.Event) -> GangRun:
    """Return the run of a kernel that was attached when the owner sent ``events`` and exited."""
    ours, theirs = socket.socketpair()
    with theirs:
        framing.send(theirs, Attached("g1", Control(True, ""), len(events), None))
        framing.send(theirs, OwnerEvents(tuple(map(ev.encode, events))))
        attached = OwnerConnection(ours, "control")
    run = GangRun("g1", run_log.Record(run_log.run_dir("g1"), None, pytest.fail))
    attached._follow(run, AttachedGang(run))
    assert run.ended.is_set()
    return run


def test_a_gang_whose_record_cannot_be_finished_ends(full_disk: list[list[str]]) -> None:
    write("g1", launched("g1", owner=DEAD), METRICS)
    state = followed(launched("g1", owner=DEAD)).state
    assert (state.state, state.reason) == ("STOPPED", "its owner process ended unexpectedly")
    assert full_disk == [["g1"]]


@pytest.mark.parametrize("answer", [["FromTheFuture", {}], ["Attached", {"gang": 1}], "text"])
def test_an_answer_that_cannot_be_read_is_an_error_of_ours(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(*arguments: object) -> socket.socket:
        sockets.extend(socket.socketpair())
        framing.send(sockets[-1], answer)
        return sockets[-2]

    def begin(theirs: socket.socket, stderr: object) -> MagicMock:
        framing.send(theirs, answer)
        return MagicMock()

    sockets: list[socket.socket] = []
    monkeypatch.setattr(connection.local_socket, "connect", connected)
    with pytest.raises(HydrogenError, match=r"owner process of gang g1 .* cannot be read: \w+"):
        connection.connect("g1", "control")
    assert sockets[0].fileno() == -1
    sockets[1].close()
    monkeypatch.setattr(start, "_start_process", begin)
    monkeypatch.setattr(start, "_send", lambda *arguments: None)
    with pytest.raises(PlacementError, match=r"of the gang did not start: \w+"):
        start._started(MagicMock(), MagicMock())


def test_a_gang_that_has_ended_waits_for_no_record(full_disk: list[list[str]]) -> None:
    folder = write("g1", launched("g1", owner=DEAD))
    (folder / run_log.UNSEEN).touch()  # by the owner, which was killed at the end
    assert followed(launched("g1", owner=DEAD), METRICS, ENDED).state.state == "SUCCEEDED"
    assert full_disk == [] and not run_log.is_unseen("g1")


def test_a_record_that_cannot_be_finished_is_attached_to(full_disk: list[list[str]]) -> None:
    write("g1", launched("g1", owner=DEAD), METRICS)
    gang = connection.attach("g1")
    assert (gang.state, gang.wait(0)) == ("STOPPED", True)
    assert full_disk == [["g1"]]
    known_gangs.forget(gang)  # other tests have gangs of this id, too


def test_displays_are_not_in_the_record_which_goes_on_after_the_others() -> None:
    shown = ev.Display(0.5, 0, 0, "show", {"text/plain": "1"})
    write("g1", launched("g1"), METRICS, ENDED)
    run = followed(launched("g1"), shown, shown)
    assert [*run.events] == [launched("g1"), shown, shown, METRICS, ENDED]


def test_a_gang_that_is_attached_to_before_its_owner_exits_is_seen() -> None:
    folder = write("g1", launched("g1"), ENDED)
    (folder / run_log.UNSEEN).touch()  # at the launch
    gang = connection.attach("g1")
    process._complete_record(gang, is_seen=False)
    assert not run_log.is_unseen("g1")
    known_gangs.forget(gang)


def test_a_gang_without_a_record_is_not_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel could attach to it, and its results would be deleted with its owner."""
    done: list[str] = []
    note = SimpleNamespace(text="this run is not recorded: [Errno 122] Disk quota exceeded")
    gang = SimpleNamespace(
        id="g1",
        snapshot=lambda: SimpleNamespace(notices=(note,)),
        stop=lambda kill: done.append(f"stop {kill}"),
        wait=lambda: done.append("wait"),
    )
    monkeypatch.setattr(launcher, "launch_captured", lambda *args, **options: gang)
    monkeypatch.setattr(payload, "from_memfd", lambda fd: None)
    closure = os.open(os.devnull, os.O_RDONLY)
    request: Any = MagicMock()
    with pytest.raises(PlacementError, match=r"needs a record of the gang.*Disk quota exceeded"):
        process._launched(request, closure)
    assert done == ["stop True", "wait"]


def test_a_terminal_that_follows_leaves_control_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "threading", MagicMock())
    gang: Any = FakeGang(tmp_path)
    served = server.OwnerServer(gang, MagicMock())
    watch, first, second = (
        server._AttachedClient(MagicMock(), Attach(wants, ""))
        for wants in ("watch", *["control"] * 2)
    )
    for client in (watch, first, second):
        served._begin(client, is_taken=False)
    ours: list[Any] = [watch.known_control, first.known_control, second.known_control]
    assert [control.is_yours for control in ours] == [False, True, False]
    served._end(first)
    assert served._control_of(second).is_yours
    served._end(second)
    assert served.is_attended and not served._control_of(watch).is_yours
