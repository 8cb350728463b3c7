"""A sweep: one gang for each combination of values, as many at once as fit, the others in a queue."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hydrogen_magic import plugins
from hydrogen_magic.capture import Captured
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver import launcher, tracking
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.interrupts import interrupts_held
from hydrogen_magic.driver.state.gang_state import GangState, RankState
from hydrogen_magic.driver.sweep_values import folders_of, label_of, params_of
from hydrogen_magic.driver.tracking import SweepGroup
from hydrogen_magic.errors import GangStoppedError, HydrogenError, ResultError, SweepError
from hydrogen_magic.node.worker.checkpoints import checkpoint

if TYPE_CHECKING:
    import pandas

    from hydrogen_magic.views.sweep import SweepView

_POLL_S = 0.1
"""How long the end of a run may go unnoticed while others wait for its place."""


class SweepRun:
    """One combination of a sweep: it waits for its turn, then it is a gang."""

    def __init__(self, values: Mapping[str, Any], launch: Callable[[], Gang]) -> None:
        self.values = values
        self.label = label_of(values)
        self.gang: Gang | None = None
        self._launch: Callable[[], Gang] | None = launch
        """None after its call: it holds what the cell captured."""
        self._refused: BaseException | None = None
        """Why it never became a gang."""

    def start(self) -> None:
        """Become a gang; one that cannot be launched ends this run only."""
        assert self._launch is not None
        try:
            self.gang = self._launch()
        except BaseException as error:
            self.refuse(error)
            if not isinstance(error, HydrogenError):
                raise
        finally:
            self._launch = None

    def refuse(self, reason: BaseException) -> None:
        """Never become a gang."""
        self._refused = reason
        self._launch = None

    @property
    def state(self) -> str:
        """``QUEUED``, then the state of a gang."""
        if self.gang is not None:
            return self.gang.state
        if self._refused is None:
            return "QUEUED"
        return "STOPPED" if isinstance(self._refused, GangStoppedError) else "FAILED"

    @property
    def error(self) -> BaseException | None:
        """Why it has no result, None for a run that succeeded or has not ended."""
        if self.gang is None:
            return self._refused
        try:
            self.gang.raise_for_state()
        except BaseException as error:  # of a rank inside the kernel it is the user's own
            return error
        lost = self.gang.received.of(0).errors if self.gang.wait(0) else {}
        return ResultError("\n".join(lost.values())) if lost else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it has ended; waits for a gang."""
        return self._refused is not None if self.gang is None else self.gang.wait(timeout_s)

    def events(self, start: int = 0) -> Sequence[ev.Event]:
        """Return the events of its gang, from the ``start``-th on."""
        if self.gang is not None:
            return self.gang.events(start)
        if self._refused is None:
            return []
        ended: list[ev.Event] = [ev.GangEnded(0.0, self.state, str(self._refused))]
        return ended[start:]

    def row(self) -> dict[str, Any]:
        """Return what :attr:`Sweep.results` has of it."""
        gang, error = self.gang, self.error
        state = gang.snapshot() if gang is not None else None
        is_complete = state is not None and state.state == "SUCCEEDED" and error is None
        return {
            "params": dict(self.values),
            "gang": gang.id if gang is not None else None,
            "state": self.state,
            "duration_s": state.length_s(time.time()) if state is not None else None,
            "metrics": dict(state.last_metrics) if state is not None else {},
            "result": gang.result if gang is not None and is_complete else None,
            "out": dict(gang.out) if gang is not None and is_complete else {},
            "error": None if error is None else str(error),
        }


class Sweep:
    """The runs of one cell with each combination of values; the value of a cell with ``--sweep``.

    ``len(sweep)`` is the number of combinations. The result of a failed or stopped run is None.
    """

    def __init__(
        self,
        runs: Sequence[SweepRun],
        n_at_once: int,
        group: SweepGroup | None = None,
    ) -> None:
        self.n_at_once = n_at_once
        """How many runs fit beside each other."""
        self._group = group
        self.runs = tuple(runs)
        """The combinations, in their order."""
        self._queue = deque(runs)
        self._running: list[SweepRun] = []
        self.is_stopping = False
        self._is_killed = False

    # ── for the user ──

    @property
    def gangs(self) -> list[Gang | None]:
        """The gang of each combination, None for one that never started."""
        return [run.gang for run in self.runs]

    @property
    def results(self) -> list[dict[str, Any]]:
        """One dict for each combination, in their order.

        Keys: ``params`` (the values of the combination), ``gang`` (its id), ``state`` (``QUEUED PENDING
        RUNNING SUCCEEDED FAILED STOPPED``), ``duration_s``, ``metrics`` (the last value of each), ``result``
        (rank 0's value, None for a run without success), ``out`` (the variables of ``--out``) and
        ``error`` (its message, or None).
        """
        return [run.row() for run in self.runs]

    @property
    def table(self) -> pandas.DataFrame:
        """The results as a DataFrame, one row for each combination.

        Columns as in :func:`hydrogen_magic.history`: ``gang state duration_s``, ``params.NAME``,
        ``metrics.NAME``; then ``result``.
        """
        import pandas

        table: pandas.DataFrame = pandas.DataFrame([_flat(row) for row in self.results])
        return table

    def best(self, name: str, *, largest: bool = False) -> dict[str, Any]:
        """Return the item of :attr:`results` with the smallest value of ``name``.

        ``name``: a logged metric, of which the last value counts, or a key of results that are dicts.
        ``largest``: return the one with the largest value. Runs that failed or were stopped do not count.
        Raises KeyError if no run has a finite value of that name.
        """
        ended = [row for row in self.results if row["state"] == "SUCCEEDED"]
        found = [(value, row) for row in ended if (value := _number(row, name)) is not None]
        if not found:
            known = dict.fromkeys(key for row in ended for key in _scores(row))
            raise KeyError(
                f"no run has a finite {name!r}; known: {', '.join(map(str, known)) or 'none'}"
            )
        return (max if largest else min)(found, key=lambda each: each[0])[1]

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        runs = counted(len(self), "run")
        return f"<Sweep of {runs}: {self.progress}; see .table, .results and .best(name)>"

    @property
    def progress(self) -> str:
        """How many runs are in which state: ``2 succeeded, 1 running, 3 queued``."""
        counts = Counter(run.state.lower() for run in self.runs)
        return ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])

    # ── control ──

    @property
    def has_more(self) -> bool:
        """Whether a run is left that :meth:`advance` has not seen end."""
        return bool(self._running or self._queue)

    def advance(self) -> bool:
        """Start runs where others have ended; return whether any is left. Waits for a moment."""
        for run in self._running[:1]:
            run.wait(_POLL_S)
        self._running = [run for run in self._running if not run.wait(0)]
        while self._queue and len(self._running) < self.n_at_once and not self.is_stopping:
            self._start(self._queue.popleft())
        return self.has_more

    def _start(self, run: SweepRun) -> None:
        self._running.append(run)
        run.start()
        if isinstance(run.error, KeyboardInterrupt):  # of a rank inside the kernel
            self.stop()
        if self.is_stopping and run.gang is not None:  # requested while it was started
            run.gang.stop_for("user", self._is_killed)

    def stop(self, kill: bool = False) -> None:
        """Stop the running gangs, with ``kill`` at once, and start no further one. Does not wait."""
        self.stop_for("user", kill)

    def stop_for(self, reason: str, kill: bool = False) -> None:
        """Stop it for a reason that :class:`~hydrogen_magic.core.events.StopRequested` names."""
        self.is_stopping, self._is_killed = True, self._is_killed or kill
        while self._queue:
            run = self._queue.popleft()
            run.refuse(GangStoppedError("the sweep was stopped before it started"))
        for run in list(self._running):
            if run.gang is not None:
                run.gang.stop_for(reason, kill)

    def finish_tracking(self) -> None:
        """Close its group in the tracker, and give that a moment. All runs have ended."""
        gangs = [gang for gang in self.gangs if gang is not None]
        if self._group is not None:
            is_success = all(run.error is None for run in self.runs)
            state = "STOPPED" if self.is_stopping else "SUCCEEDED" if is_success else "FAILED"
            closing = self._group.close([gang.wait_for_tracker for gang in gangs], state)
            tracking.finish(gangs, closing)

    def raise_for_state(self) -> None:
        """Raise GangStoppedError or SweepError unless all runs have succeeded."""
        has_failed = any(run.error is not None for run in self.runs)
        if has_failed and self.is_stopping:
            raise GangStoppedError(
                f"the sweep was stopped: {self.progress}{_where_results(self.runs)}"
            )
        if has_failed:
            raise _error_of(self.runs)


_STATES = ("succeeded", "failed", "stopped", "running", "pending", "queued")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    params = {f"params.{name}": value for name, value in row["params"].items()}
    metrics = {f"metrics.{name}": value for name, value in row["metrics"].items()}
    first = {name: row[name] for name in ("gang", "state", "duration_s")}
    return {**first, **params, **metrics, "result": row["result"]}


def _scores(row: Mapping[str, Any]) -> Mapping[Any, Any]:
    result = row["result"] if isinstance(row["result"], Mapping) else {}
    return {**result, **row["metrics"]}


def _number(row: Mapping[str, Any], name: str) -> float | None:
    try:
        value = float(_scores(row)[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


# ── its failures ─────────────────────────────────────────────────────────────────────────────────


def _error_of(runs: Sequence[SweepRun]) -> SweepError:
    """Return the error of a sweep, some of whose runs have failed.

    In its report, combinations that failed in the same way share one.
    """
    failed = [run for run in runs if run.error is not None]
    by_reason: dict[str, list[SweepRun]] = {}
    for run in failed:
        by_reason.setdefault(_first_line(run), []).append(run)
    count = f"{len(failed)} of {counted(len(runs), 'run')} of the sweep failed"
    each = "; ".join(f"{run.label}: {_first_line(run)}" for run in failed)
    lines = [f"SweepError: {count}{_where_results(runs)}"]
    for alike in by_reason.values():
        names = ", ".join(map(_name_and_id, alike))
        lines += ["", f"── {names} ──", *_own_report(alike[0])]
    return SweepError(f"{count}: {each}{_where_results(runs)}", report="\n".join(lines))


def _where_results(runs: Sequence[SweepRun]) -> str:
    """Return where the results of the runs that succeeded are, as the end of a sentence."""
    has_any = any(run.state == "SUCCEEDED" for run in runs)
    return "; hydrogen_magic.last_sweep() has the results of the others" if has_any else ""


def _name_and_id(run: SweepRun) -> str:
    return f"{run.label} ({run.gang.id})" if run.gang is not None else run.label


def _first_line(run: SweepRun) -> str:
    error = run.error
    text = str(error).partition("\n")[0]
    return text if isinstance(error, HydrogenError) else f"{type(error).__name__}: {text}"


def _own_report(run: SweepRun) -> list[str]:
    error = run.error
    return error.report.splitlines() if isinstance(error, HydrogenError) else [_first_line(run)]


# ── running it ───────────────────────────────────────────────────────────────────────────────────

_newest: deque[Sweep] = deque(maxlen=1)


def prepare(
    captured: Sequence[tuple[Mapping[str, Any], Captured]],
    spec: JobSpec,
    title: str,
    most_at_once: int | None = None,
) -> tuple[Sweep, list[GangState]]:
    """Return a sweep and the states of its runs before they start.

    ``captured``: the values of each combination, and the cell captured with them. ``most_at_once``: None:
    as many as fit.
    """
    group = SweepGroup(plugins.tracker(spec.track), spec.name) if spec.track else None
    most = min(len(captured), most_at_once or len(captured))
    n_at_once = plugins.placement(spec.placement).n_at_once(spec, most)
    runs: list[SweepRun] = []
    for (values, cell), folder in zip(captured, _folders(spec.env, captured), strict=True):
        listed = replace(cell, params={**cell.params, **params_of(values)})
        name, env = f"{spec.name} {label_of(values)}", _own_checkpoints(spec.env, folder)
        named = replace(spec, name=name, env=env, n_at_once=n_at_once)
        launch = partial(launcher.launch_captured, listed, named, title=title, group=group)
        runs.append(SweepRun(values, launch))
    return Sweep(runs, n_at_once, group), [_planned(run, spec) for run in runs]


def _folders(
    env: Iterable[tuple[str, str]], captured: Sequence[tuple[Mapping[str, Any], Captured]]
) -> list[str]:
    """Return the name of each combination's folder; without a folder of checkpoints no value is read."""
    if not dict(env).get(checkpoint.FOLDER):
        return [""] * len(captured)
    return folders_of((values, cell.digest_of) for values, cell in captured)


def _own_checkpoints(env: Iterable[tuple[str, str]], folder: str) -> tuple[tuple[str, str], ...]:
    """Return ``env`` with ``folder`` inside the user's folder of checkpoints, if it names one."""
    return tuple(
        (name, os.path.join(value, folder) if value and name == checkpoint.FOLDER else value)
        for name, value in env
    )


def _planned(run: SweepRun, spec: JobSpec) -> GangState:
    return GangState(
        name=run.label,
        params=params_of(run.values),
        placement=spec.placement,
        rendezvous=spec.rendezvous,
        state=run.state,
        ranks=tuple(map(RankState, range(spec.np))),
    )


def last_sweep() -> Sweep | None:
    """Return this kernel's newest sweep, also one that failed or was stopped; None before the first."""
    return _newest[-1] if _newest else None


def attend(sweep: Sweep, view: SweepView) -> None:
    """Run the sweep to its end. The first interrupt stops its gangs and its queue, the second kills."""
    _newest.append(sweep)
    with interrupts_held() as interrupts, ExitStack() as endings:
        endings.callback(sweep.finish_tracking)
        endings.callback(view.close, sweep)
        endings.callback(_end, sweep)  # the first of them
        interrupts.take(sweep)
        while sweep.advance():
            view.update(sweep)


def _end(sweep: Sweep) -> None:
    """Leave no gang unattended if the view or a launch failed."""
    if sweep.has_more:
        sweep.stop_for("cell")
    while sweep.advance():
        pass
