"""A rank's channel over the network, between the kernel and an agent on another machine.

::

    dispatcher ── socket ── ForwardedChannel ══ parts of files ══ ForwardedChannel ── socket ── rank

Both sides of a channel use a Unix socket and shared memory, wherever the rank is. Here each frame becomes a
file: its label is the frame, its content is what the frame refers to in shared memory. The other end puts
that into a memory file, which it passes on with the frame.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hydrogen_magic.core import messages as msg
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import framing
from hydrogen_magic.transport.file_transfer import Outgoing

Frame = Mapping[str, object]
_LAST_FRAMES_S = 1.0
"""How long a channel that is closed may take to pass its last frames on."""


class ForwardedChannels:
    """One end of the channels of an attempt's ranks on one host."""

    def __init__(self, outgoing: Outgoing, report: Callable[[str], None]) -> None:
        """``report``: shows a warning to the user."""
        self._outgoing = outgoing
        self._report = report
        self._open: dict[tuple[str, int, int], ForwardedChannel] = {}
        """By gang, attempt and rank."""

    def open(self, gang: str, attempt: int, fds: Mapping[int, int]) -> None:
        """Forward the channels whose sockets on this machine are ``fds``, by their ranks."""
        left = dict(fds)
        try:
            for rank, fd in fds.items():
                label = functools.partial(msg.ChannelFrame, gang, attempt, rank)
                channel = ForwardedChannel(fd, label, self._outgoing, self._report)
                self._open[gang, attempt, rank] = channel
                del left[rank]
        finally:
            framing.close_all(left.values())

    def take(self, label: msg.ChannelFrame, fd: int) -> None:
        """Pass on a frame of the other end, whose content is in ``fd``: it is closed then."""
        channel = self._open.get((label.gang, label.attempt, label.rank))
        if channel is None:  # the attempt is over here
            os.close(fd)
        else:
            channel.take(label.frame, fd)

    async def close(self, gang: str, attempt: int, *, drains: bool = False) -> None:
        """Close the channels of an attempt; see :meth:`ForwardedChannel.close`.

        Those of another one may be open: an agent serves the next gang before the last host of this one ends.
        """
        keys = [key for key in self._open if key[:2] == (gang, attempt)]
        await asyncio.gather(*(self._open.pop(key).close(drains=drains) for key in keys))


class ForwardedChannel:
    """One end. It runs on the event loop from its creation until :meth:`close`."""

    def __init__(
        self,
        fd: int,
        label: Callable[[Frame | None], msg.ChannelFrame],
        outgoing: Outgoing,
        report: Callable[[str], None],
    ) -> None:
        """``fd``: the channel's socket on this machine, which it takes over. ``label``: returns the label
        of a frame, None for the end of the channel. ``report``: shows a warning to the user.
        """
        self._nothing = memory_file("nothing")
        self._sock = framing.inherited(fd)
        self._reader = framing.FrameReader(self._sock)
        self._label = label
        self._outgoing = outgoing
        self._report = report
        self._buffers: dict[int, int] = {}
        """Number of a shared buffer -> descriptor."""
        self._arrived: asyncio.Queue[tuple[Frame | None, int]] = asyncio.Queue()
        self._forwarding = asyncio.ensure_future(self._forward())
        self._delivering = asyncio.ensure_future(self._deliver())

    # ── from here to the other end ──

    async def _forward(self) -> None:
        try:
            while (received := await self._received()) is not None:
                await self._send(*received)
        except Exception as error:  # too many open files, a frame that is too large, garbage
            self._give_up(error)
        await self._outgoing.send_file(self._label(None), self._nothing)

    async def _send(self, frame: Frame, fds: Sequence[int]) -> None:
        try:
            fd, size = self._content(frame, fds)
            await self._outgoing.send_file(self._label(frame), fd, size=size)
        finally:
            framing.close_all(set(fds).difference(self._buffers.values()))

    async def _received(self) -> tuple[Frame, list[int]] | None:
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        while True:
            for message in self._reader.messages():
                return message
            is_readable.clear()
            loop.add_reader(self._sock, is_readable.set)
            try:
                await is_readable.wait()
            finally:
                loop.remove_reader(self._sock)
            with suppress(BlockingIOError):
                if not self._reader.feed(socket.MSG_DONTWAIT):
                    return None

    def _content(self, frame: Frame, fds: Sequence[int]) -> tuple[int, int]:
        """Return the file with what ``frame`` refers to, and its size there.

        Its sender uses the same buffer again only after an answer, so the content stays until it is sent.
        """
        number, end = frame.get("buffer"), frame.get("end")
        if isinstance(number, int) and isinstance(end, int):
            if fds:
                self._close_buffer(number)
                self._buffers[number] = fds[0]
            return self._buffers[number], end
        fd = fds[0] if fds else self._nothing
        return fd, os.fstat(fd).st_size

    def _close_buffer(self, number: int) -> None:
        if (fd := self._buffers.pop(number, None)) is not None:
            os.close(fd)

    # ── from the other end to here ──

    def take(self, frame: Frame | None, fd: int) -> None:
        """Pass a frame on with the content that has come with it; ``fd`` is closed then."""
        self._arrived.put_nowait((frame, fd))

    async def _deliver(self) -> None:
        """Return after :meth:`close`. In a thread: the socket may be full."""
        while (arrived := await self._arrived.get())[1] >= 0:
            frame, fd = arrived
            try:
                if frame is None:
                    self._sock.shutdown(socket.SHUT_WR)
                else:
                    fds = [fd] if os.fstat(fd).st_size else []
                    await asyncio.to_thread(framing.send, self._sock, frame, fds)
            except OSError:
                pass  # the process at the socket has closed it
            except Exception as error:  # no thread can be started
                self._give_up(error)
            finally:
                os.close(fd)

    # ── the end ──

    def _give_up(self, error: Exception) -> None:
        self._report(f"the channel of a rank was closed: {type(error).__name__}: {error}")
        self._shut_down()

    def _shut_down(self) -> None:
        with suppress(OSError):  # the process at the socket has closed it
            self._sock.shutdown(socket.SHUT_RDWR)

    async def close(self, *, drains: bool = False) -> None:
        """Close the channel after the frames that have arrived have been passed on.

        ``drains``: also forward what the process at the socket, which has closed it, has still sent.
        """
        self._arrived.put_nowait((None, -1))
        ending = [self._delivering, *([self._forwarding] if drains else [])]
        await asyncio.wait(ending, timeout=_LAST_FRAMES_S)
        self._shut_down()
        self._forwarding.cancel()
        await asyncio.wait([self._forwarding, self._delivering])
        for number in list(self._buffers):
            self._close_buffer(number)
        os.close(self._nothing)
        self._reader.close()
        self._sock.close()
