"""Observer of Lightning: metrics and progress, by a callback in every Trainer, on every rank.

All values logged for loggers become curves over ``global_step``, at each step: no logger is needed, and
``log_every_n_steps`` applies only to loggers. Values passed to a logger of Lightning directly, as
``LearningRateMonitor`` does, become curves over the given step. Values that Lightning then writes through a
``SummaryWriter`` are not shown again. tqdm's observer records tqdm's bars; a rich bar, which draws boxes
into the output, is disabled and replaced by ours, as on ranks other than 0, where Lightning shows none.
``barebones=True``, a request for speed, is respected.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers, tensorboard
from hydrogen_magic.node.worker.reporting import reporter as _reporter


def attach(module: ModuleType) -> None:
    """Patch ``Trainer``; ``module`` is ``trainer.trainer`` of lightning.pytorch or pytorch_lightning."""
    package = module.__name__.removesuffix(".trainer.trainer")
    module.Trainer.__init__ = helpers.followed(
        module.Trainer.__init__, lambda _, trainer, /, *__, **___: _join(trainer, package)
    )
    # No public interface separates values that Lightning passes to its loggers from the user's.
    connector = module._LoggerConnector
    connector.log_metrics = helpers.claiming(connector.log_metrics)
    loggers = importlib.import_module(f"{package}.loggers")
    # Not those of the user: a class that is pickled by value would bring our wrapper with it.
    kinds: Iterator[Any] = filter(inspect.isclass, vars(loggers).values())
    for kind in kinds:
        if issubclass(kind, loggers.Logger) and kind is not loggers.Logger:
            kind.log_metrics = helpers.claiming(kind.log_metrics, _passed_to)


@helpers.safely
def _join(trainer: Any, package: str) -> None:
    if _reporter.current() is not None and not trainer.barebones:
        base = importlib.import_module(f"{package}.callbacks").Callback
        trainer.callbacks.append(helpers.new_callback(_LightningHooks, base))


_last_passed = helpers.for_each_gang(list[Any])
"""What was recorded last: its logger, a key, and the values, whose identities are in the key."""


@helpers.safely
def _passed_to(logger: Any, metrics: Any, step: Any = None) -> None:
    """Record values for a logger; a Trainer's other loggers get the same ones."""
    values = dict(helpers.flattened(metrics, "/"))
    values.pop(tensorboard.NO_CURVE, None)
    last, key = _last_passed(), [step, *values, *map(id, values.values())]
    if last[1:2] != [key] or last[0] == id(logger):
        last[:] = id(logger), key, values
        helpers.log(values, step)


class _LightningHooks:
    """The hooks of our callback; the Trainer is only read, except for a rich bar."""

    def __init__(self) -> None:
        self._step = 0
        self._last: dict[str, Any] = {}
        self._shows_bars = False
        self._n_batches: float = math.inf
        self._training = helpers.LibraryBar()
        self._evaluating = helpers.LibraryBar()

    @helpers.safely
    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._step = trainer.global_step
        bar = trainer.progress_bar_callback
        self._shows_bars = bar is not None and getattr(bar, "refresh_rate", 1) > 0
        if _is_rich(bar):
            bar.disable()
        elif trainer.is_global_zero:
            self._shows_bars = False

    # ── training ─────────────────────────────────────────────────────────────────────────────────

    @helpers.safely
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._see(trainer)  # of the previous epoch, computed after all hooks of its end
        if self._shows_bars:
            self._n_batches = trainer.progress_bar_callback.total_train_batches
            self._training.show(_epoch(trainer), 0, self._n_batches)

    @helpers.safely
    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self._step = trainer.global_step

    @helpers.safely
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._see(trainer)
        if self._shows_bars:
            self._training.show(_epoch(trainer), batch_idx + 1, self._n_batches)

    @helpers.safely
    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._see(trainer)
        self._training.close()

    # ── other loops ──────────────────────────────────────────────────────────────────────────────

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        is_checking = trainer.sanity_checking
        totals = trainer.num_sanity_val_batches if is_checking else trainer.num_val_batches
        self._show("Sanity check" if is_checking else "Validation", batch_idx, totals, loader)

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        self._show("Test", batch_idx, trainer.num_test_batches, loader)

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        self._show("Predict", batch_idx, trainer.num_predict_batches, loader)

    @helpers.safely
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._evaluating.close()
        if not trainer.sanity_checking:
            self._see(trainer)

    on_test_end = on_validation_end

    @helpers.safely
    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self._evaluating.close()

    @helpers.safely
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._training.close()
        self._evaluating.close()

    @helpers.safely
    def _show(self, title: str, batch: int, totals: Any, loader: int) -> None:
        if self._shows_bars:
            total = totals[loader] if isinstance(totals, list) else totals
            self._evaluating.show(title, batch + 1, total)

    def _see(self, trainer: Any) -> None:
        helpers.log(dict(self._new(trainer.logged_metrics)), self._step)

    def _new(self, logged: Any) -> Iterator[tuple[str, Any]]:
        """Yield values logged since the last call: Lightning keeps the last value of every name.

        Each value has its own memory, and is held here, so that no other one can reuse its address.
        """
        for name, value in logged.items():
            last = self._last.get(name)
            if last is None or last.data_ptr() != value.data_ptr():
                self._last[name] = value
                yield name, value


def _is_rich(bar: Any) -> bool:
    return any(kind.__name__ == "RichProgressBar" for kind in type(bar).__mro__)


def _epoch(trainer: Any) -> str:
    last = trainer.max_epochs
    of = f"/{last - 1}" if last is not None and last > 0 else ""
    return f"Epoch {trainer.current_epoch}{of}"
