"""The error of a sweep, some of whose runs have failed."""

from __future__ import annotations

from collections.abc import Sequence

from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.sweep_run import SweepRun
from hydrogen_magic.errors import HydrogenError, SweepError


def error_of(runs: Sequence[SweepRun]) -> SweepError:
    """Return the error of a sweep, some of whose runs have failed."""
    failed = [run for run in runs if run.error is not None]
    return SweepError(_headline(runs, failed), report=_report(runs, failed))


def where_results(runs: Sequence[SweepRun]) -> str:
    """Return where the results of the runs that succeeded are, as the end of a sentence."""
    has_any = any(run.state == "SUCCEEDED" for run in runs)
    return "; hydrogen_magic.last_sweep() has the results of the others" if has_any else ""


def _headline(runs: Sequence[SweepRun], failed: Sequence[SweepRun]) -> str:
    each = "; ".join(f"{run.label}: {_first_line(run)}" for run in failed)
    return f"{_count(runs, failed)}: {each}{where_results(runs)}"


def _count(runs: Sequence[SweepRun], failed: Sequence[SweepRun]) -> str:
    return f"{len(failed)} of {counted(len(runs), 'run')} of the sweep failed"


def _report(runs: Sequence[SweepRun], failed: Sequence[SweepRun]) -> str:
    """Return the failures; combinations that failed in the same way share one report."""
    by_reason: dict[str, list[SweepRun]] = {}
    for run in failed:
        by_reason.setdefault(_first_line(run), []).append(run)
    lines = [f"SweepError: {_count(runs, failed)}{where_results(runs)}"]
    for alike in by_reason.values():
        names = ", ".join(map(_name_and_id, alike))
        lines += ["", f"── {names} ──", *_own_report(alike[0])]
    return "\n".join(lines)


def _name_and_id(run: SweepRun) -> str:
    return f"{run.label} ({run.gang.id})" if run.gang is not None else run.label


def _first_line(run: SweepRun) -> str:
    error = run.error
    text = str(error).partition("\n")[0]
    return text if isinstance(error, HydrogenError) else f"{type(error).__name__}: {text}"


def _own_report(run: SweepRun) -> list[str]:
    error = run.error
    return error.report.splitlines() if isinstance(error, HydrogenError) else [_first_line(run)]
