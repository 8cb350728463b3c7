"""Observer of MLflow: values that a cell logs to the active run become curves.

Without a step, for which MLflow takes 0, calls are counted. Values that MLflow's autologging writes by its
client are not recorded here: the observers of those libraries have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import span_recording
from hydrogen_magic.node.worker.observe.helpers import log, safely, seen


def attach(module: ModuleType) -> None:
    """Patch ``mlflow.log_metric`` and ``log_metrics``; ``module`` is ``mlflow.tracking.fluent``."""
    for name, see in (("log_metric", _see_metric), ("log_metrics", _see_metrics)):
        # ``mlflow`` itself has them too if it was imported before, as in a forkserver.
        span_recording.put(module, "mlflow", name, seen(getattr(module, name), see))


@safely
def _see_metric(key: str, value: Any, step: Any = None, *_: Any, **__: Any) -> None:
    log({key: value}, step)


@safely
def _see_metrics(metrics: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
    log(metrics, step)
