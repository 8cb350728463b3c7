"""The list of sessions."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.views.tables import sessions_table


def session(**changes: Any) -> Any:
    shown = {"title": "lab", "spec": JobSpec(np=4), "place": "local", "since": time.time()}
    held = {"memory_bytes": 3 << 30, "gpu_memory_bytes": 0, "shown_names": "model, x"}
    state = {"is_running": False, "idle_since_s": time.monotonic()}
    return SimpleNamespace(**{**shown, **held, **state, **changes})


def test_a_session_shows_its_memory_and_that_on_gpus() -> None:
    on_gpu = session(title="gpu", gpu_memory_bytes=40 << 30, is_running=True)
    _, plain, gpu = sessions_table([session(), on_gpu]).lines()
    assert plain.startswith("lab      4      local  ") and plain.split()[-4:-2] == ["3.2", "GB"]
    assert gpu.endswith("running   3.2 GB, GPU 42.9 GB  model, x")
