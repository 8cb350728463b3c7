"""The relay of an application: one for all of its gangs, and none that nobody closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hydrogen_magic.driver.placements.remote.agents import RemoteAgentPool
from hydrogen_magic.driver.placements.spark import hosts
from hydrogen_magic.driver.placements.spark.relay import Relay
from hydrogen_magic.errors import PlacementError

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
