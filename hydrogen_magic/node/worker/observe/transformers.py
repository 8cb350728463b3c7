"""Observer of Transformers' ``Trainer``: logs and progress, by a callback in every Trainer.

Values logged by the Trainer become curves over ``global_step``; those that its callbacks pass on, as to
TensorBoard, are not shown again. Its bars are tqdm's and only on rank 0, so the other ranks get ours.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers

_AXES = ("epoch", "step", "total_flos")
_SPEEDS = ("_runtime", "_per_second", "_compilation_time")
_SUMMARY = "train_runtime"
"""Names in the logs of a whole training that are not points of a curve."""


def attach(module: ModuleType) -> None:
    """Add our callback to the default callbacks; ``module`` is ``transformers.trainer``."""
    module.DEFAULT_CALLBACKS.append(
        helpers.callback_class(_TransformersHooks, module.TrainerCallback)
    )


def attach_to_integrations(module: ModuleType) -> None:
    """Hide what callbacks pass on (to TensorBoard, W&B, MLflow, …); ``module`` defines their classes."""
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "on_log" in vars(kind):
            kind.on_log = helpers.claiming(kind.on_log)  # type: ignore[attr-defined]


class _TransformersHooks:
    """The hooks of our callback; it never changes the Trainer's ``control``."""

    def __init__(self) -> None:
        self._training = helpers.LibraryBar("step")
        self._predicting = helpers.LibraryBar("batch")
        self._n_predicted = 0

    @helpers.safely
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and _SUMMARY not in logs:
            curves = {name: value for name, value in logs.items() if _is_curve(name)}
            helpers.log(curves, state.global_step)

    @helpers.safely
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if _has_no_bar(args, state):
            self._training.show("", state.global_step, state.max_steps)

    @helpers.safely
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training.close()

    @helpers.safely
    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if _has_no_bar(args, state):
            self._n_predicted += 1
            self._predicting.show("", self._n_predicted, _length(eval_dataloader))

    @helpers.safely
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._n_predicted = 0
        self._predicting.close()

    on_predict = on_evaluate


def _is_curve(name: str) -> bool:
    return name not in _AXES and not name.endswith(_SPEEDS)


def _has_no_bar(args: Any, state: Any) -> bool:
    """Return whether the Trainer would show a bar on rank 0, but not on this rank."""
    return not state.is_world_process_zero and not args.disable_tqdm


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None  # of a dataset without a length
