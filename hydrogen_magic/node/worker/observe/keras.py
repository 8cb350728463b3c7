"""Observer of Keras 3: progress, steps and metrics, by a callback in every ``CallbackList``.

The metrics of each batch become curves over the optimizer's steps, which continue from epoch to epoch and
from fit to fit; metrics of the end of an epoch (``val_…``) are added there. Keras prints its bar if the
user asked for it (``verbose=1`` or ``2``, a ``ProgbarLogger``); with the default, ``"auto"``, the views
draw it instead. With ``verbose=0`` there is no bar here either.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models whose metrics are recorded here."""


class Automatic(int):
    """A verbosity that the user did not choose; Keras 3 passes ``"auto"``."""


def attach(module: ModuleType, hooks: type[KerasHooks] | None = None) -> None:
    """Make every ``CallbackList`` call our callback too; ``module`` is ``keras.callbacks``."""
    observer = helpers.callback_class(hooks or KerasHooks, module.Callback)
    original = module.CallbackList.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        is_rank = _reporter.current() is not None
        verbose = kwargs.get("verbose")
        is_automatic = verbose == "auto" or isinstance(verbose, Automatic)
        if is_rank and is_automatic and kwargs.get("add_progbar"):
            original(self, *args, **{**kwargs, "add_progbar": False})
        else:
            original(self, *args, **kwargs)
        if is_rank:
            _join(self, observer)

    module.CallbackList.__init__ = __init__
    _hide(module.TensorBoard)


def attach_to_loggers(module: ModuleType) -> None:
    """Hide callbacks that pass the metrics on, as to W&B or MLflow; ``module`` defines them."""
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            _hide(kind)


def _hide(callback: type) -> None:
    for hook in ("on_batch_end", "on_train_batch_end", "on_epoch_end", "on_test_end"):
        if hook in vars(callback):
            setattr(callback, hook, helpers.claiming(getattr(callback, hook)))


def is_seen(model: object) -> bool:
    """Return whether our callback records this model's training logs."""
    return model in _seen


@helpers.safely
def _join(callbacks: Any, observer: type[Any]) -> None:
    # Not through the arguments: a callback of the user for batches ends Keras's background calls.
    ours = observer()
    ours.set_params(getattr(callbacks, "params", {}))
    callbacks.callbacks.append(ours)
    ours.joined(callbacks)
    model = getattr(callbacks, "model", None)  # may be set later, which reaches ours, or never
    if model is not None:
        ours.set_model(model)


def _is_on_jax() -> bool:
    """Whether metrics are arrays of JAX. To read them in the thread of Keras's background calls breaks the
    step that runs meanwhile: "Buffer has been deleted or donated" (JAX 0.10.2 on CPUs, Keras 3.15).
    """
    import keras

    return bool(keras.config.backend() == "jax")


class KerasHooks:
    """The hooks of our callback. Threads may call those for batches in any order."""

    model: Any
    params: Any

    def __init__(self) -> None:
        super().__init__()
        self.params = {}
        self._lock = threading.Lock()
        self._bar = helpers.LibraryBar()
        self._inner = helpers.LibraryBar()
        self._is_fitting = False
        self._title = ""
        self._first_step = 0
        self._n_batches = 0
        self._n_inner = 0
        self._names: set[str] = set()

    def joined(self, callbacks: Any) -> None:
        """Have its hooks called; ``callbacks`` is the ``CallbackList`` that it was appended to."""
        if _is_on_jax():
            callbacks._async_train = callbacks._async_test = callbacks._async_predict = False

    def set_model(self, model: Any) -> None:
        """Note the model as recorded here."""
        super().set_model(model)  # type: ignore[misc]  # of the library's class
        self._note_model()

    @helpers.safely
    def _note_model(self) -> None:
        _seen.add(self.model)

    def means(self, logs: Any) -> Mapping[str, Any]:
        """Return the metrics of a batch as means over the replicas."""
        return logs or {}

    def steps_done(self) -> int:
        """Return the optimizer's steps."""
        optimizer = getattr(self.model, "optimizer", None)
        return 0 if optimizer is None else int(optimizer.iterations)

    # ── fit ──────────────────────────────────────────────────────────────────────────────────────

    @helpers.safely
    def on_train_begin(self, logs: Any = None) -> None:
        self._is_fitting = True
        self._first_step = self.steps_done()

    @helpers.safely
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        of = f"/{self.params['epochs']}" if "epochs" in self.params else ""
        self._title = f"Epoch {epoch + 1}{of}"
        self._n_batches = 0
        self._show()

    @helpers.safely
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        helpers.log(self.means(logs), self._first_step + batch)
        self._names.update(logs or {})
        with self._lock:
            self._count_steps(batch + 1 - self._n_batches)
            self._show(batch + 1)

    @helpers.safely
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        new = {name: value for name, value in (logs or {}).items() if name not in self._names}
        helpers.log(new, self._first_step + max(self._n_batches - 1, 0))
        self._first_step += self._n_batches
        self._inner.close()

    @helpers.safely
    def on_train_end(self, logs: Any = None) -> None:
        self._is_fitting = False
        self._bar.close()

    # ── evaluate and predict; evaluate also inside of fit ────────────────────────────────────────

    @helpers.safely
    def on_test_begin(self, logs: Any = None) -> None:
        self._begin("Validation" if self._is_fitting else "Evaluate")

    @helpers.safely
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_fitting:
            self._show_inner(batch + 1)
        else:
            with self._lock:
                self._show(batch + 1)

    @helpers.safely
    def on_test_end(self, logs: Any = None) -> None:
        if self._is_fitting:
            self._inner.close()
            return
        helpers.log({f"test_{name}": v for name, v in (logs or {}).items()}, self.steps_done())
        self._bar.close()

    @helpers.safely
    def on_predict_begin(self, logs: Any = None) -> None:
        self._begin("Predict")

    @helpers.safely
    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._lock:
            self._show(batch + 1)

    @helpers.safely
    def on_predict_end(self, logs: Any = None) -> None:
        self._bar.close()

    # ── shared ───────────────────────────────────────────────────────────────────────────────────

    def _begin(self, title: str) -> None:
        self._n_inner = 0
        if not self._is_fitting:
            self._title, self._n_batches = title, 0
            self._show()

    def _show(self, n: int = 0) -> None:
        self._n_batches = max(self._n_batches, n)
        if self.params.get("verbose"):
            self._bar.show(self._title, self._n_batches, self.params.get("steps"))

    def _show_inner(self, n: int) -> None:
        """Show a validation whose length Keras does not report."""
        self._n_inner = max(self._n_inner, n)
        if self.params.get("verbose"):
            self._inner.show("Validation", self._n_inner, None)

    def _count_steps(self, n: int) -> None:
        """Report the steps that torch's hook of optimizers would see, but Keras's does not."""
        reporter = _reporter.current()
        if reporter is not None:
            for _ in range(n):
                reporter.steps.add(id(self.model))
