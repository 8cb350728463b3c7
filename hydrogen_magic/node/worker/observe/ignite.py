"""Observer of PyTorch-Ignite: metrics, numbers that engines put out, and progress.

The steps are the iterations of the outermost engine that runs, usually the trainer. When two engines have a
metric of one name, that of the second engine gets its number as prefix: ``engine2/accuracy``. An engine with
a logger that is itself observed (TensorBoard, W&B, MLflow) is recorded by what that logger writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from numbers import Number
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_OBSERVED_LOGGERS = {"MLflowLogger", "TensorboardLogger", "WandBLogger"}

_running: list[_Watch] = []
"""Those of engines that run, the outermost first."""
_numbers = helpers.for_each_gang(weakref.WeakKeyDictionary[Any, int])
"""Engines that have run in this gang, and their numbers."""
_owners = helpers.for_each_gang(dict[str, int])
"""Curve -> number of the first engine that had it."""
_logged: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines with a logger that is observed."""
_with_bar: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines with a bar of Ignite, which is tqdm's."""


def attach(module: ModuleType) -> None:
    """Patch ``Engine.run``; ``module`` is ``ignite.engine.engine``."""
    original = module.Engine.run

    @wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _reporter.current() is None:
            return original(self, *args, **kwargs)
        with _Watch(self, module.Events):
            return original(self, *args, **kwargs)

    module.Engine.run = run


def attach_to_loggers(module: ModuleType) -> None:
    """Note which engines have loggers; ``module`` is ``ignite.handlers.base_logger``."""
    original = module.BaseLogger.attach

    @wraps(original)
    def attach(self: Any, engine: Any, log_handler: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = {kind.__name__ for kind in type(self).__mro__}
        if "ProgressBar" in kinds:
            _with_bar.add(engine)
        elif kinds & _OBSERVED_LOGGERS and isinstance(log_handler, module.BaseOutputHandler):
            _logged.add(engine)
        return original(self, engine, log_handler, *args, **kwargs)

    module.BaseLogger.attach = attach


class _Watch:
    """Observes one run of an engine."""

    def __init__(self, engine: Any, events: Any) -> None:
        self._engine = engine
        numbers = _numbers()  # deleted engines have left it, so its length may be a number in use
        self._number = numbers.setdefault(engine, 1 + max(numbers.values(), default=0))
        self._known: dict[str, Any] = {}
        """Metrics that are recorded, or of an earlier run: engines keep the last value of each."""
        self._bar = helpers.LibraryBar()
        self._handlers = {
            events.ITERATION_COMPLETED: self._on_iteration,
            events.EPOCH_COMPLETED: self._on_epoch,
        }

    def __enter__(self) -> None:
        outer = _running[-1:]
        _running.append(self)
        self._begin(outer)

    def __exit__(self, *error: object) -> None:
        _running.pop()
        self._end()

    @helpers.safely
    def _begin(self, outer: list[_Watch]) -> None:
        for trainer in outer:  # its metrics come first, so that they keep their names
            trainer.log_metrics()
        self._known.update(self._engine.state.metrics)
        # Now, after the handlers of metrics: they compute their values before ours are called.
        for event, handler in self._handlers.items():
            self._engine.add_event_handler(event, handler)

    @helpers.safely
    def _end(self) -> None:
        self._bar.close()
        for event, handler in self._handlers.items():
            self._engine.remove_event_handler(handler, event)

    @helpers.safely
    def _on_iteration(self, engine: Any) -> None:
        if self is _running[0]:
            output = engine.state.output
            self._log(output if isinstance(output, Mapping) else {"output": output})
        self.log_metrics()
        if engine not in _with_bar:
            self._show(engine.state)

    def _on_epoch(self, engine: Any) -> None:
        self.log_metrics()

    @helpers.safely
    def log_metrics(self) -> None:
        """Record the metrics that were computed since the last call."""
        found = self._engine.state.metrics.items()
        fresh = {name: value for name, value in found if self._known.get(name) is not value}
        self._known.update(fresh)
        self._log(fresh)

    def _log(self, values: Mapping[str, Any]) -> None:
        if self._engine not in _logged:
            curves = {self._curve(str(k)): v for k, v in values.items() if _is_number(v)}
            helpers.log(curves, _running[0]._engine.state.iteration)

    def _curve(self, name: str) -> str:
        is_first = _owners().setdefault(name, self._number) == self._number
        return name if is_first else f"engine{self._number}/{name}"

    def _show(self, state: Any) -> None:
        length = state.epoch_length
        done = state.iteration if length is None else (state.iteration - 1) % length + 1
        of = "" if state.max_epochs is None else f"/{state.max_epochs}"
        title = f"Epoch {state.epoch}{of}" if self is _running[0] else "Evaluation"
        self._bar.show(title, done, length)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or getattr(value, "shape", None) == ()
