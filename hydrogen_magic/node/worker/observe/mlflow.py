"""Observer of MLflow: values that a cell logs to the active run become curves.

Without a step, for which MLflow takes 0, calls are counted. Values that MLflow's autologging writes by its
client are not recorded here: the observers of those libraries have them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import metrics


def attach(module: ModuleType) -> None:
    """Patch ``mlflow.log_metric`` and ``log_metrics``; ``module`` is ``mlflow.tracking.fluent``."""
    log_metric, log_metrics = module.log_metric, module.log_metrics

    @functools.wraps(log_metric)
    def seen_metric(key: str, value: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = log_metric(key, value, step, *args, **kwargs)
        _see({key: value}, step)
        return result

    @functools.wraps(log_metrics)
    def seen_metrics(metrics: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = log_metrics(metrics, step, *args, **kwargs)
        _see(metrics, step)
        return result

    vars(module).update(log_metric=seen_metric, log_metrics=seen_metrics)


@metrics.safely
def _see(values: dict[str, Any], step: Any) -> None:
    if not metrics.is_claimed():
        metrics.log(values, step)
