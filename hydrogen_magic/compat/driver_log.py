"""Messages from a rank to the driver: ``log_to_driver`` and ``LogCallback`` of ``sparkdl``.

The originals are ``sparkdl.horovod.log_to_driver`` and ``sparkdl.horovod.tensorflow.keras.LogCallback``
(https://databricks.github.io/spark-deep-learning).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydrogen_magic.compat.keras_callback import KerasCallback
from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.observe import helpers, keras
from hydrogen_magic.node.worker.reporting import reporter

_LONGEST = 4000
"""Maximum length of a message in characters, as in the original."""


def log_to_driver(message: str) -> None:
    """Print ``message`` in the notebook that started the gang, even if it does not show the ranks' output.

    Returns at once. Only the first 4,000 characters are used. In a plain process, print it there.
    """
    text = str(message)[:_LONGEST]
    here = reporter.current()
    if here is None:
        print(text)
        return
    here.report(ev.Output(here.now_s(), here.rank, ev.DRIVER, f"{text}\n"))


class LogCallback(KerasCallback):
    """Reports the training of a Keras model with :func:`log_to_driver`; only on rank 0.

    A callback for Keras 2 and 3 by its interface; Keras itself need not be installed. Metrics become curves
    too, if no other observer records them.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        """``per_batch_log``: report every batch, not only epochs."""
        super().__init__()
        self.per_batch_log = per_batch_log
        self._epoch = 0
        self._n_batches = 0
        self._batch_metrics: set[str] = set()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the start of an epoch; Keras counts from 0, the report from 1."""
        self._epoch = epoch
        self._log_epoch("begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Called by Keras: a batch of :meth:`on_batch_end`."""
        self.on_batch_end(batch, logs)

    def on_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the results of a batch, if requested."""
        logs = logs or {}
        self._batch_metrics.update(logs)
        self._record(logs, self._n_batches)
        self._n_batches += 1
        if self.per_batch_log:
            self._log_epoch(f"batch {batch + 1}", logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the results of an epoch."""
        logs = logs or {}
        new = {name: value for name, value in logs.items() if name not in self._batch_metrics}
        self._record(new, max(self._n_batches - 1, 0))
        self._log_epoch("ends", logs)

    def _log_epoch(self, what: str, logs: Mapping[str, Any] | None = None) -> None:
        if api.rank() == 0:
            epochs = self.params.get("epochs")
            of = f"/{epochs}" if epochs else ""
            values = ", ".join(f"{name} {_short(value)}" for name, value in (logs or {}).items())
            log_to_driver(f"epoch {self._epoch + 1}{of} {what}{f': {values}' if values else ''}")

    def _record(self, logs: Mapping[str, Any], step: int) -> None:
        if not keras.is_seen(self.model):
            helpers.log(logs, step)


def _short(value: Any) -> str:
    """Return a metric as text: numbers with four digits."""
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
