"""Weights & Biases: runs of their own beside the one that the notebook may have."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from hydrogen_magic.core.library_types import is_installed
from hydrogen_magic.driver.trackers import MetricPoint, RunInfo, TrackedRun, Tracker

_WITHOUT_SERVER = {"offline", "disabled", "dryrun"}
_OLDEST = (0, 19, 11)
"""The first version with several runs at once in a process (``reinit="create_new"``)."""


class WandbTracker(Tracker):
    """Runs in the project, entity and mode of the user's configuration."""

    def fault(self) -> str | None:
        if not is_installed("wandb"):
            return "wandb is not installed: pip install wandb"
        found = version("wandb")
        if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            return f"wandb {found} is older than {oldest}: pip install -U wandb"
        if _is_logged_in():
            return None
        return (
            "wandb has no API key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )

    def start(self, info: RunInfo) -> TrackedRun:
        import wandb

        about = {**info.about, "gang": info.gang}
        run = wandb.init(
            # WANDB_RUN_ID is for a run of the user: ranks that log to it would log twice.
            id=uuid4().hex[:8],
            name=info.name,
            group=info.group or None,
            config={**info.params, "hydrogen_magic": about},
            reinit="create_new",
            # The kernel's output is not the gang's.
            settings=wandb.Settings(console="off", silent=True),
        )
        # Ranks log the same steps one after another, which would be out of order otherwise.
        run.define_metric("*", step_metric="step")
        return _WandbRun(run)


def _is_logged_in() -> bool:
    import wandb

    if wandb.setup().settings.mode in _WITHOUT_SERVER:
        return True
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # an older version, which would ask here
        return True


class _WandbRun(TrackedRun):
    def __init__(self, run: Any) -> None:
        self._run = run
        self.where = str(Path(run.dir).parent) if run.offline else run.url or ""

    def log(self, points: Sequence[MetricPoint]) -> None:
        for point in points:
            self._run.log({**point.values, "step": point.step})

    def add_file(self, path: Path) -> None:
        shutil.copy(path, self._run.dir)  # whose files are uploaded at the end

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "SUCCEEDED" else 1)
