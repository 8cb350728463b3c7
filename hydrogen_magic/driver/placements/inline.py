"""One rank inside the kernel, for a fast start and ``%debug``.

The closure is unpacked into a separate module, so the cell works on copies here too and does not change the
notebook.
"""

from __future__ import annotations

import os
import socket
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.driver.placements import Attempt, EventSink, InKernelPlacement, Job, devices
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker import main_thread, namespace
from hydrogen_magic.node.worker.checkpoints import checkpoint
from hydrogen_magic.node.worker.reporting import reporter
from hydrogen_magic.node.worker.results import results
from hydrogen_magic.serialization.payload import Payload, from_memfd


class InlinePlacement(InKernelPlacement):
    """One rank inside this process."""

    def plan(self, spec: JobSpec) -> Plan:
        if spec.np != 1:
            raise PlacementError(
                f"`--np {spec.np} --on inline`: the notebook's process can be only one rank; use "
                "`--np 1`, or `--on local`"
            )
        gpus, notes = devices.assign(spec, os.environ)
        given = {"--retries": spec.retries, "--timeout": spec.timeout_s}
        if unused := [option for option, value in given.items() if value]:
            are = "have" if len(unused) > 1 else "has"
            why = "the notebook's process can be neither restarted nor stopped"
            notes = (*notes, f"{' and '.join(unused)} {are} no effect with --on inline: {why}")
        return Plan(
            (Slot(0, 0, 0, 1, 1, 1, os.uname().nodename, gpus[0], interface=LOOPBACK),), notes
        )

    def run_here(self, attempt: Attempt, sink: EventSink) -> None:
        job = attempt.job

        def send(batch: Sequence[ev.Event]) -> None:
            for event in batch:
                sink.emit(event)

        rank_reporter = reporter.Reporter(0, job.clock_zero_s, send)
        rank_reporter.exchanges.rendezvous = job.spec.rendezvous
        rank_reporter.exchanges.join_advice = job.rendezvous.join_advice
        slot = job.plan.slots[0]
        device = devices.device_name(job.plan, slot)
        sink.emit(ev.RankStarted(rank_reporter.now_s(), 0, os.getpid(), slot.host, device))
        with ExitStack() as stack:
            stack.enter_context(_environment(_rendezvous_environment(attempt, stack)))
            reporter.install(rank_reporter)
            stack.callback(reporter.install, None)
            rank_reporter.start()
            stack.callback(rank_reporter.close)
            try:
                _run(job, sink, rank_reporter)
            except BaseException as error:
                report = main_thread.report_exception(error)
                rank_reporter.post(ev.RankFailed(rank_reporter.now_s(), 0, report, "running"))
                rank_reporter.post(ev.RankExited(rank_reporter.now_s(), 0, 1))
                raise


def _run(job: Job, sink: EventSink, rank_reporter: reporter.Reporter) -> None:
    assert job.feed is None  # %%infer refuses this placement
    rank_reporter.post(ev.RankPhase(rank_reporter.now_s(), 0, "loading"))
    loaded = namespace.load(_closure(job), types.ModuleType("__main__"))
    rank_reporter.post(ev.RankPhase(rank_reporter.now_s(), 0, "running"))
    value = loaded.run()
    nbytes = results.deliver(
        loaded, value, True, lambda part, section, on_write: sink.deliver(0, part, section)
    )
    rank_reporter.post(ev.RankResult(rank_reporter.now_s(), 0, nbytes))
    rank_reporter.post(ev.RankExited(rank_reporter.now_s(), 0, 0))


def _closure(job: Job) -> Payload:
    with open(job.closure.dup(), "rb") as file:
        return from_memfd(file.fileno())


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rendezvous_environment(attempt: Attempt, stack: ExitStack) -> dict[str, str]:
    """Return the environment of the single rank; a thread of this process serves its rendezvous."""
    job = attempt.job
    held = socket.create_server(("127.0.0.1", 0))
    stack.callback(held.close)
    info = job.rendezvous.prepare(
        job.plan, *held.getsockname()[:2], spec=job.spec, gang=attempt.gang, attempt=0
    )
    over = threading.Event()
    thread = threading.Thread(
        target=job.rendezvous.serve_here,
        args=(held, over),
        name="hydrogen_magic.rendezvous",
        daemon=True,
    )
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)
    stack.callback(job.rendezvous.undo_here())
    saved = checkpoint.environment(job.checkpoints, is_shared=True)
    return {**info.environments[0], **saved, **dict(job.spec.env)}
