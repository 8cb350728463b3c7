"""The relay of an application: one for all of its gangs, and none that nobody closes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from hydrogen_magic.driver.placements.remote.agents import RemoteAgentPool
from hydrogen_magic.driver.placements.spark import hosts, relay
from hydrogen_magic.driver.placements.spark.relay import Relay
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.spark import relay_endpoint

SESSION: Any = SimpleNamespace(spark=None, application="app")
WHERE = "driver:4000, on the Spark driver's host"


class FakeRelay:
    """A relay that starts when ``ready`` is set, and fails with ``error``."""

    made: ClassVar[list[FakeRelay]] = []
    error: Exception | None = None

    def __init__(self, *_: Any) -> None:
        self.ready = asyncio.Event()
        self.is_closed = False
        self.on_failure: Callable[[str], None] = lambda text: None
        self.made.append(self)

    async def start(self) -> tuple[str, int]:
        await self.ready.wait()
        if self.error is not None:
            raise self.error
        if self.is_closed:
            raise PlacementError("it was closed")
        return "driver", 4000

    async def close(self) -> None:
        self.is_closed = True
        self.ready.set()


async def called(function: Callable[[], Any]) -> Any:
    """Take the place of ``asyncio.to_thread``."""
    return await function()


async def using() -> asyncio.Future[str]:
    """Begin to use the relay, as a gang does."""
    found = asyncio.ensure_future(hosts._use_relay(SESSION, None))
    await asyncio.sleep(0)
    return found


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeRelay]:
    """The relays that were made."""
    monkeypatch.setattr(FakeRelay, "made", [])
    monkeypatch.setattr(hosts, "Relay", FakeRelay)
    monkeypatch.setattr(asyncio, "to_thread", called)
    return FakeRelay.made


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RemoteAgentPool:
    monkeypatch.setattr(
        "hydrogen_magic.driver.placements.local_agents.before_closing", lambda close: None
    )
    loop = SimpleNamespace(call_soon_threadsafe=lambda call, *args: call(*args))
    hub: Any = SimpleNamespace(loop=loop, listen=lambda *_: "tcp://127.0.0.1:1")
    found = RemoteAgentPool(hub)
    monkeypatch.setattr(hosts, "agent_pool", lambda: found)
    return found


def test_gangs_of_one_application_share_a_relay(
    pool: RemoteAgentPool, made: list[FakeRelay]
) -> None:
    async def use() -> None:
        waiting = [await using() for _ in range(3)]
        (relay,) = made
        waiting[0].cancel()  # a Stop of the gang that began it
        await asyncio.sleep(0)
        relay.ready.set()
        assert await asyncio.gather(*waiting[1:]) == [WHERE] * 2
        assert await hosts._use_relay(SESSION, None) == WHERE
        assert hosts.endpoints(SESSION, None) == ["tcp://driver:4000"] and len(made) == 1
        await pool._close_relays()
        assert relay.is_closed and pool.relays == {}

    asyncio.run(use())


def test_a_relay_that_starts_is_closed_with_the_others(
    pool: RemoteAgentPool, made: list[FakeRelay]
) -> None:
    async def use() -> None:
        waiting = await using()
        waiting.cancel()
        await pool._close_relays()
        assert made[0].is_closed and pool.relays == {}
        await asyncio.sleep(0)
        assert pool.relays == {}

    asyncio.run(use())


def test_only_the_relay_that_failed_is_forgotten(
    pool: RemoteAgentPool, made: list[FakeRelay], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        for number in range(2):
            waiting = await using()
            made[number].ready.set()
            await waiting
            made[0].on_failure("broken")
            assert len(pool.relays) == number
        monkeypatch.setattr(FakeRelay, "error", PlacementError("refused"))
        pool.relays.clear()
        waiting = await using()
        made[2].ready.set()
        with pytest.raises(PlacementError, match="refused"):
            await waiting
        assert pool.relays == {}

    asyncio.run(use())


def test_a_relay_that_is_closed_before_its_thread_runs_does_not_start() -> None:
    relay = Relay(None, ("127.0.0.1", 1))
    relay.close()
    relay._run()
    with pytest.raises(ConnectionError, match="it was closed"):
        relay._address.result(0)


def test_a_request_that_is_not_answered_in_time_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay's process listens and does not accept: its host was paused. Then it exits."""
    monkeypatch.setattr(relay_endpoint, "_REACH_S", 0.1 - relay_endpoint.LONGEST_WAIT_S)
    name = f"test-{os.getpid()}"
    options = {"relay": name, "do": str(relay_endpoint.PULL), "number": "1"}
    with socket.socket(socket.AF_UNIX) as requests:
        requests.bind(f"\0hydrogen_magic/relay/{name}")
        requests.listen()
        assert relay_endpoint.answer(options, {}).keys() == {"unanswered"}
    assert relay_endpoint.answer(options, {}).keys() == {"error"}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Requests whose answers are set by ``answers``, each after six seconds of a clock of their own."""

    def in_daemon_thread(work: Callable[[], Any], _: str) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done

    clock = itertools.count(0.0, 3.0)  # it is read twice for each request
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(relay, "_AGAIN_S", 0.0)
    monkeypatch.setattr(relay, "_courier", lambda: None)
    monkeypatch.setattr(relay, "in_daemon_thread", in_daemon_thread)
    found: Any = object.__new__(relay._RelayRequests)
    found._session, found._relay = Mock(), "name"
    loaded = found._session.read.format.return_value.options.return_value.load
    loaded.side_effect = lambda: SimpleNamespace(
        schema=[SimpleNamespace(metadata=next(found.answers))]
    )
    return found


def test_an_unanswered_request_is_repeated_until_the_time_is_over(requests: Any) -> None:
    unanswered = {"unanswered": ""}
    port = {"reply": base64.b64encode((4000).to_bytes(2, "big")).decode()}
    requests.answers = iter([unanswered, port])
    assert requests.start("driver", None) == 4000
    requests.answers = iter([unanswered, {"reply": ""}])
    assert asyncio.run(requests.ask(relay_endpoint.PUSH, 1)) == b""
    requests.answers = itertools.repeat(unanswered)
    with pytest.raises(TimeoutError, match="no answer for 25 s"):
        asyncio.run(requests.ask(relay_endpoint.PUSH, 1))
    with pytest.raises(TimeoutError, match="no answer for 60 s"):
        requests.start("driver", None)
