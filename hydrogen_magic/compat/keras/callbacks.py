"""Horovod's callbacks for Keras, with the interface of Keras's ``Callback``; Keras is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydrogen_magic.compat.keras import collectives
from hydrogen_magic.compat.keras_callback import KerasCallback
from hydrogen_magic.node.worker import api

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

Logs = dict[str, Any]


class BroadcastGlobalVariablesCallback(KerasCallback):
    """Gives all ranks the weights of rank ``root_rank``: those of the model and the optimizer."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """``device`` is ignored: Horovod has it for TensorFlow."""
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called by Keras once all variables exist."""
        optimizer = self.model.optimizer
        variables = [*self.model.weights, *(optimizer.variables if optimizer is not None else ())]
        collectives.exchange().broadcast(variables, self.root_rank)


class MetricAverageCallback(KerasCallback):
    """Averages the metrics of an epoch over all ranks.

    Callbacks that use them (``ReduceLROnPlateau``, ``TensorBoard``) come after this one in the list.
    """

    def __init__(self, device: str = "") -> None:
        """``device`` is ignored: Horovod has it for TensorFlow."""
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replace the values in ``logs``: numbers, and arrays such as those of ``F1Score``."""
        if not logs:
            return
        import keras
        import numpy as np

        names = sorted(logs)
        values = [np.asarray(keras.ops.convert_to_numpy(logs[name]), float) for name in names]
        means = collectives.exchange().average(np.concatenate(values, axis=None).tolist())
        starts = np.cumsum([value.size for value in values])[:-1]
        for name, value, mean in zip(names, values, np.split(means, starts), strict=True):
            logs[name] = mean.reshape(value.shape) if value.ndim else float(mean[0])


class LearningRateScheduleCallback(KerasCallback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Set up the schedule.

        Args:
            initial_lr: what is multiplied.
            multiplier: a function of the epoch, which counts from 0; a number m means
                ``m ** (epoch - start_epoch)``.
            start_epoch: the first epoch in which the rate is set.
            end_epoch: the first one in which it is not set any more; None: it always is.
            staircase: True: set it once an epoch. False: before each batch, and the epoch is a fraction.
            momentum_correction: scale the optimizer's momentum for the batch in which the rate changes;
                not possible with JAX.
            steps_per_epoch: number of batches; None: as Keras reports it.
        """
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = (
            multiplier if callable(multiplier) else _exponential(multiplier, start_epoch)
        )
        self._epoch = 0
        self._momentum: float | None = None
        """To be restored after the batch."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise ValueError if the number of batches is needed and unknown."""
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__} cannot find the number of batches of an epoch: pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the learning rate, if it is time."""
        is_over = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self._epoch)

    def _set_rate(self, epoch: float) -> None:
        exchange, optimizer = collectives.exchange(), self.model.optimizer
        exchange.before_change(self.model)
        before, rate = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = rate
        momentum = None if exchange.keeps_momentum_fixed else getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum and before:
            self._momentum = momentum
            optimizer.momentum = momentum * rate / before

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Restore the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` over the first epochs.

    As in "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (https://arxiv.org/abs/1706.02677).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """``warmup_epochs``: number of epochs until the rate reaches ``initial_lr``.

        ``verbose``: 1 prints a line on rank 0 then. The other arguments are those of the base class.
        """
        super().__init__(
            initial_lr,
            self._warmup,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _warmup(self, epoch: float) -> float:
        """Return the multiplier; at the end of an epoch, that of the next whole number."""
        assert self.steps_per_epoch is not None
        done = epoch + 1 / self.steps_per_epoch
        return (done * (api.world_size() - 1) / self.warmup_epochs + 1) / api.world_size()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the learning rate to the metrics, and print it after the last epoch of the warmup."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and api.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _exponential(base: float, start_epoch: int) -> Callable[[float], float]:
    return lambda epoch: base ** (epoch - start_epoch)
