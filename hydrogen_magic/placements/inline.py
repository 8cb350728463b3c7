"""One rank inside the kernel: slow to nothing, open to ``%debug``, and bound to nobody else.

The closure is unpacked into a module of its own, so the cell works on copies here too and changes
nothing of the notebook.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from hydrogen_magic import events as ev
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.placements import Attempt, Crew, Sink, devices
from hydrogen_magic.spec import JobSpec, Plan, Slot
from hydrogen_magic.worker import namespace, reporter, watch

__all__ = ["InlinePlacement", "run_here"]


class InlinePlacement:
    """See :class:`hydrogen_magic.placements.Placement`."""

    def plan(self, spec: JobSpec) -> Plan:
        if spec.np != 1:
            raise PlacementError(
                f"`--np {spec.np} --on inline`: the notebook's own process can be one rank only: "
                "use `--np 1`, or `--on local`"
            )
        gpus, notes = devices.assign(spec, devices.visible_gpus(os.environ))
        return Plan((Slot(0, 0, 0, 1, 1, 1, os.uname().nodename, gpus[0]),), notes)

    def open(self) -> Crew:
        raise PlacementError("the inline placement runs in the kernel itself and has no crew")


def run_here(attempt: Attempt, sink: Sink) -> None:
    """Run the attempt's one rank now and deliver its result. Raises what the cell raises."""

    def now_s() -> float:
        return time.monotonic() - attempt.clock_zero_s

    def send(batch: object) -> None:
        for event in batch:  # type: ignore[attr-defined]
            sink.emit(event)

    slot = attempt.plan.slots[0]
    sink.emit(ev.RankStarted(now_s(), 0, os.getpid(), slot.host, devices.device_name(slot)))
    said = reporter.Reporter(0, attempt.clock_zero_s, send)
    with ExitStack() as stack:
        stack.enter_context(_environment(_meet(attempt, stack)))
        reporter.install(said)
        stack.callback(reporter.install, None)
        said.start()
        stack.callback(said.close)
        try:
            _run(attempt, sink, said, now_s)
        except BaseException as error:
            report = watch.report_exception(error)
            said.post(ev.RankFailed(now_s(), 0, report, "running"))
            said.post(ev.RankExited(now_s(), 0, 1))
            raise


def _run(attempt: Attempt, sink: Sink, said: reporter.Reporter, now_s: object) -> None:
    clock = said.now_s
    said.post(ev.RankPhase(clock(), 0, "loading"))
    loaded = namespace.load(attempt.parcel, types.ModuleType("__main__"))
    said.post(ev.RankPhase(clock(), 0, "running"))
    value = loaded.run()
    result = loaded.collect(value)
    sink.deliver(0, result)
    said.post(ev.RankResult(clock(), 0, result.nbytes))
    said.post(ev.RankExited(clock(), 0, 0))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _meet(attempt: Attempt, stack: ExitStack) -> dict[str, str]:
    """Return the environment of the one rank; serves its store from this process."""
    held = socket.create_server(("127.0.0.1", 0))
    stack.callback(held.close)
    address, port = held.getsockname()[:2]
    meeting = attempt.rendezvous.prepare(
        attempt.plan, address, port, gang=attempt.gang, attempt=0, retries=0
    )
    if "torch" in sys.modules:
        from torch.distributed import TCPStore

        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(held.fileno()),
        )
        stack.callback(lambda: store)  # kept alive until the rank is done
    return {**meeting.environments[0], **dict(attempt.spec.env)}
