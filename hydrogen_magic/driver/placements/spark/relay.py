"""Relay for executors that cannot reach this process, through the Spark Connect server.

::

    hub ◀──TCP── Relay ──requests of Spark Connect──▶ relay_daemon ◀──TCP── agents on executors

The bytes are part of requests to analyse a plan: these need no executor's slot, and the gang may hold all
of them. At most two are pending: one that waits for incoming bytes, up to a second, and one that sends
bytes. Each is numbered and may be repeated, so that a broken connection loses nothing. The data is
encrypted end to end by :mod:`hydrogen_magic.transport.channel`; the relay is not trusted.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import inspect
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from hydrogen_magic.core.network import PortRange
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.spark import relay_daemon, relay_endpoint
from hydrogen_magic.transport import multiplexer
from hydrogen_magic.transport.daemon_thread import in_daemon_thread

_NAME = "hydrogen_magic_relay"
_THREAD = "hydrogen_magic relay"
_START_S = 60.0
"""For the first request, a server starts Python and loads modules for the analysis of plans."""
_ANSWER_TIMEOUT_S = 25.0
"""Maximum time without an answer: less than the relay on the driver's host waits for a request."""
_AGAIN_S = 0.2
_CLOSE_S = 3.0


class Relay:
    """Lets executors reach a TCP address of this process through Spark Connect's server."""

    def __init__(self, spark: Any, target: tuple[str, int], ports: PortRange | None = None) -> None:
        """``target``: where the hub listens. ``ports``: for executors, on the driver's host."""
        self.on_failure: Callable[[str], None] | None = None
        """Called once, in a thread of the relay, with the error that broke it; not after :meth:`close`."""
        self._spark = spark
        self._target = target
        self._ports = ports
        self._address: Future[tuple[str, int]] = Future()
        self._line: _RelayRequests | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)

    def start(self) -> tuple[str, int]:
        """Return the address on the driver's host that executors connect to.

        Raises PlacementError with the reason if the server does not allow it.
        """
        self._thread.start()
        try:
            return self._address.result()
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):  # an interrupt, not an error of the server
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise PlacementError(
                "executors cannot reach this machine, and the Spark Connect server cannot relay "
                f"their connections: {reason}"
            ) from error

    def close(self) -> None:
        """End everything, within seconds even without answers. May be called twice, and by any thread."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it just ended by itself
                self._loop.call_soon_threadsafe(self._closing.set)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=_CLOSE_S)
        elif not self._loop.is_closed():
            self._loop.close()
        if self._line is not None:
            self._line.close()

    def _run(self) -> None:
        if self._loop.is_closed():
            self._address.set_exception(ConnectionError("it was closed"))
            return
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        closing = asyncio.ensure_future(self._closing.wait())
        relaying = asyncio.ensure_future(self._relay())
        await asyncio.wait([closing, relaying], return_when=asyncio.FIRST_COMPLETED)
        await multiplexer.cancelled([closing, relaying])
        broken = None if relaying.cancelled() else relaying.exception()
        if not self._address.done():
            self._address.set_exception(broken or ConnectionError("it was closed"))
        elif broken is not None and self.on_failure is not None:
            self.on_failure(f"the relay through the Spark Connect server failed: {broken}")

    async def _relay(self) -> None:
        """Relay data until cancelled; raises errors."""
        try:
            line, address = await asyncio.wait_for(
                in_daemon_thread(self._open, f"{_THREAD} request"), _START_S
            )
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer for {_START_S:.0f} s") from None
        self._address.set_result(address)
        pump = multiplexer.Pump(lambda: asyncio.open_connection(*self._target))
        both = [
            asyncio.ensure_future(way) for way in (self._fetch(line, pump), self._bring(line, pump))
        ]
        try:
            await asyncio.gather(*both)
        finally:
            await multiplexer.cancelled(both)
            await pump.close()

    def _open(self) -> tuple[_RelayRequests, tuple[str, int]]:
        host = self._spark.conf.get("spark.driver.host")
        self._line = _RelayRequests(self._spark)
        return self._line, (host, self._line.start(host, self._ports))

    async def _fetch(self, line: _RelayRequests, pump: multiplexer.Pump) -> None:
        for number in itertools.count(1):
            pump.feed(await line.ask(relay_endpoint.PULL, number))

    async def _bring(self, line: _RelayRequests, pump: multiplexer.Pump) -> None:
        for number in itertools.count(1):
            await pump.ready.wait()
            await line.ask(relay_endpoint.PUSH, number, pump.take())


class _UnansweredError(Exception):
    """The relay's process has not answered yet: the request may be repeated."""


class _RelayRequests:
    """Requests to the driver's host, in a separate session on the notebook's server.

    The notebook's session is not affected: registrations, interrupts and settings of the user stay
    separate, and closing this session ends pending requests.
    """

    def __init__(self, spark: Any) -> None:
        connection = copy.copy(spark.client._builder)
        connection._params = {k: v for k, v in connection._params.items() if k != "session_id"}
        self._session = type(spark)(connection)
        self._session.client.set_retry_policies([])  # its own last ten minutes and cannot be ended
        self._relay = secrets.token_hex(16)

    def start(self, host: str, ports: PortRange | None) -> int:
        """Start the relay at an address of the driver's host; return its port."""
        with suppress(Exception):  # only saves the server the memory of the last five requests
            self._session.conf.set("spark.connect.session.planCache.enabled", "false")
        self._session.dataSource.register(_courier())
        given = {"host": host.strip("[]"), "ports": str(ports or "0-0")}
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            with suppress(_UnansweredError):  # a busy host: the new process has not begun to answer
                reply = self._request(relay_endpoint.START, 0, b"", **given)
                return int.from_bytes(reply, "big")
        raise TimeoutError(f"no answer for {_START_S:.0f} s")

    async def ask(self, action: int, number: int, body: bytes = b"") -> bytes:
        """Return the answer, repeating a request that fails; raises after 25 s without one."""
        until_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while True:
            try:
                return await asyncio.wait_for(
                    in_daemon_thread(
                        lambda: self._request(action, number, body), f"{_THREAD} request"
                    ),
                    until_s - time.monotonic(),
                )
            except (asyncio.TimeoutError, _UnansweredError):
                if time.monotonic() + _AGAIN_S > until_s:
                    raise TimeoutError(f"no answer for {_ANSWER_TIMEOUT_S:.0f} s") from None
            except ConnectionError:
                raise  # the answer of a daemon that exists
            except Exception:
                if time.monotonic() + _AGAIN_S > until_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def _request(self, action: int, number: int, body: bytes, **more: str) -> bytes:
        reader = self._session.read.format(_NAME)
        encoded = base64.b64encode(body).decode()
        reader = reader.options(relay=self._relay, do=action, number=number, body=encoded, **more)
        said = reader.load().schema[0].metadata
        if "unanswered" in said:
            raise _UnansweredError
        if "error" in said:
            raise ConnectionError(f"the driver's host reported: {said['error']}")
        return base64.b64decode(said["reply"])

    def close(self) -> None:
        """End the relay there and the session, if the server answers in time."""
        ending = threading.Thread(target=self._end, name=_THREAD, daemon=True)
        ending.start()
        ending.join(timeout=_CLOSE_S)
        with suppress(Exception):
            self._session.client.close()

    def _end(self) -> None:
        if not self._session.client.is_closed:
            with suppress(Exception):
                self._request(relay_endpoint.STOP, 0, b"")
            with suppress(Exception):
                self._session.client.release_session()


def _courier() -> type:
    """Return the DataSource whose ``schema()`` runs :func:`relay_endpoint.answer` on the driver's host.

    A local class is pickled by value: hydrogen_magic is not installed there.
    """
    from pyspark.sql.datasource import DataSource

    name = _NAME
    code = compile(inspect.getsource(relay_endpoint), relay_endpoint.__name__, "exec")
    modules = {
        m.__name__: inspect.getsource(m) for m in (multiplexer, relay_endpoint, relay_daemon)
    }

    class Courier(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            from pyspark.sql.types import BinaryType, StructField, StructType

            here: dict[str, Any] = {"__name__": name}
            exec(code, here)
            said = here["answer"](self.options, modules)
            return StructType([StructField("said", BinaryType(), True, said)])

    return Courier
