"""What observers of libraries report in the cells of a session."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.observe import ignite, keras, optimizer, span_recording, tensorboard
from hydrogen_magic.node.worker.reporting import reporter as reporters
from tests.observed import Curves, curves


def reported(cell: Callable[[], None]) -> list[ev.Event]:
    """Run a cell as a rank of a session does; return what it has reported."""
    sent: list[ev.Event] = []
    reporter = reporters.Reporter(0, 0.0, sent.extend)
    reporter.is_recording = True
    reporters.install(reporter)
    span_recording.abandon_all()
    try:
        cell()
    finally:
        reporter.close()
    return sent


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_metrics_that_are_arrays_of_jax_are_read_between_two_steps_of_keras(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them in another thread breaks the step that runs meanwhile."""
    config = SimpleNamespace(backend=lambda: backend)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(config=config))  # type: ignore[arg-type]
    callbacks = SimpleNamespace(_async_train=True)
    keras.KerasHooks().joined(callbacks)
    assert callbacks._async_train is (backend != "jax")


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


class SummaryWriter:
    """A writer of TensorBoard that writes nothing."""

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir

    def add_scalar(self, tag: str, scalar_value: float) -> None: ...

    def add_scalars(self, main_tag: str, tag_scalar_dict: dict[str, float]) -> None: ...

    def add_hparams(self) -> None: ...


def test_curves_of_tensorboard_begin_again_with_each_cell() -> None:
    tensorboard.attach(SimpleNamespace(SummaryWriter=SummaryWriter))  # type: ignore[arg-type]

    def train() -> None:
        folders.append(f"runs/{len(folders)}")
        writer, other = SummaryWriter(folders[-1]), SummaryWriter("runs/validation")
        for value in (3.0, 2.0):
            writer.add_scalar("loss", value)
            other.add_scalar("loss", value + 1)

    folders: list[str] = []
    expected = {"loss": {0: 3.0, 1: 2.0}, "validation/loss": {0: 4.0, 1: 3.0}}
    assert [curves(reported(train)) for _ in range(2)] == [expected, expected]


class Engine:
    """An engine of Ignite that computes one metric in one iteration."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(
            metrics={}, iteration=0, output=None, epoch=1, epoch_length=1, max_epochs=1
        )
        self._handlers: dict[str, Callable[[Any], None]] = {}

    def add_event_handler(self, event: str, handler: Callable[[Any], None]) -> None:
        self._handlers[event] = handler

    def remove_event_handler(self, handler: Callable[[Any], None], event: str) -> None:
        del self._handlers[event]

    def run(self, accuracy: float) -> None:
        self.state.iteration += 1
        self.state.metrics = {"accuracy": accuracy}
        self._handlers["iteration"](self)


def test_engines_of_each_cell_are_numbered_and_no_number_is_used_twice() -> None:
    events = SimpleNamespace(ITERATION_COMPLETED="iteration", EPOCH_COMPLETED="epoch")
    ignite.attach(SimpleNamespace(Engine=Engine, Events=events))  # type: ignore[arg-type]
    kept: list[Engine] = []

    def train() -> None:
        trainer, evaluator = Engine(), Engine()
        trainer.run(0.1)
        evaluator.run(0.2)
        del trainer
        gc.collect()
        Engine().run(0.3)
        kept.append(evaluator)

    expected: Curves = {
        "accuracy": {1: 0.1},
        "engine2/accuracy": {1: 0.2},
        "engine3/accuracy": {1: 0.3},
    }
    assert [curves(reported(train)) for _ in range(2)] == [expected, expected]


# ── steps of optimizers ──────────────────────────────────────────────────────────────────────────


class Optimizer:
    """An optimizer of torch, to the observer."""


class Zero:
    """An optimizer of DeepSpeed, which steps that of the user once for each of two groups."""

    def __init__(self, step: Callable[[Any], None]) -> None:
        self._step, self._inner = step, Optimizer()
        self.overflow = False
        self.initialize_optimizer_states()

    def initialize_optimizer_states(self) -> None:
        self._step(self._inner)

    def step(self, closure: None = None) -> None:
        for _ in range(0 if getattr(self, "overflow", False) else 2):
            self._step(self._inner)


def attached() -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """Attach the observer; return a whole step of an optimizer, and one that is stopped."""
    before, after = list[Callable[..., None]](), list[Callable[..., None]]()
    module: Any = SimpleNamespace(
        torch=SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: False)),
        register_optimizer_step_pre_hook=before.append,
        register_optimizer_step_post_hook=after.append,
    )
    optimizer.attach(module)

    def step(stepping: Any) -> None:
        for hook in (*before, *after):
            hook(stepping, (), {})

    return step, lambda stopped: before[0](stopped, (), {})  # torch calls no hook after an error


def test_a_step_that_was_stopped_does_not_hide_those_of_later_cells() -> None:
    step, stop = attached()
    next_one = Optimizer()
    reported(lambda: stop(Optimizer()))
    for _ in range(2):
        sent = reported(lambda: step(next_one))
        spans = [event for event in sent if isinstance(event, ev.Spans)]
        assert [(each.names, each.depths) for each in spans] == [(("optimizer step",), (0,))]


def test_a_step_of_zero_is_one_and_that_of_an_initialization_none() -> None:
    step, _ = attached()
    optimizer.attach_to_zero(SimpleNamespace(DeepSpeedZeroOptimizer=Zero))  # type: ignore[arg-type]
    state_dict: Any = SimpleNamespace(_init_optim_state=step)
    optimizer.attach_to_state_dict(state_dict)

    def train() -> None:
        zero = Zero(step)
        state_dict._init_optim_state(Optimizer())
        for overflow in (True, False, False, True, False):
            zero.overflow = overflow
            zero.step()
            assert not span_recording.open_spans
        del zero.overflow  # as in another release
        zero.step()

    sent = reported(train)
    assert [event.count for event in sent if isinstance(event, ev.Steps)] == [4]
    [spans] = [event for event in sent if isinstance(event, ev.Spans)]
    assert spans.names == ("optimizer step",) * 4
