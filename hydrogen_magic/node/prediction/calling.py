"""The forms of ``predict`` under one interface: batches in, one output for each, in order."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.annotations import TENSOR, BatchType, wanted_by
from hydrogen_magic.serialization.pickling_errors import describe

__all__ = ["Caller", "caller_of"]


class Caller:
    """A ``predict`` that is called with every batch."""

    def __init__(self, predict: Callable[[Any], Any], kind: str) -> None:
        self.kind = kind
        """The type of a batch: one of the kinds of :mod:`annotations`."""
        self.module: Any = None
        """The ``nn.Module`` if ``predict`` is one."""
        self._predict = predict

    def outputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield one output for each of ``batches``, taking them as needed."""
        return map(self._predict, batches)

    def close(self) -> None:
        """Let ``predict`` clean up."""


def caller_of(predict: Any) -> Caller:
    """Return the caller for ``predict``; InferError if it cannot be called."""
    _refuse_what_cannot_be_called(predict)
    if _is_module(predict):
        return _ModuleCaller(predict)
    function = _function_of(predict)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise InferError(
            "predict is async, but batches are predicted one after another: write def "
            "predict(batch)"
        )
    wanted = wanted_by(predict)
    if inspect.isgeneratorfunction(function):
        _refuse_batch_of_generator(predict, wanted)
        return _StreamCaller(predict, wanted.kind)
    return (_StreamCaller if wanted.is_stream else Caller)(predict, wanted.kind)


def _refuse_what_cannot_be_called(predict: Any) -> None:
    if predict is None:
        raise InferError(
            "the cell defines no predict: add a function, def predict(batch): …, or assign a "
            "model, predict = model"
        )
    if isinstance(predict, type):
        raise InferError(
            f"predict is the class {predict.__qualname__}: create an instance in the cell, "
            f"predict = {predict.__name__}()"
        )
    if not callable(predict):
        method = getattr(predict, "predict", None)
        remedy = "use its method: predict = model.predict" if callable(method) else (
            "define a function in the cell: def predict(batch): …"
        )  # fmt: skip
        raise InferError(f"predict is a {describe(predict)}, which cannot be called: {remedy}")


def _is_module(predict: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(predict, torch.nn.Module)


def _function_of(predict: Any) -> Any:
    """Return the function behind a partial, or behind a callable instance."""
    while isinstance(predict, functools.partial):
        predict = predict.func
    is_plain = inspect.isroutine(predict) or inspect.isfunction(predict)
    return predict if is_plain else getattr(predict, "__call__", predict)  # noqa: B004


def _refuse_batch_of_generator(predict: Any, wanted: BatchType) -> None:
    says = any(
        parameter.annotation is not inspect.Parameter.empty
        for parameter in inspect.signature(predict).parameters.values()
    )
    if says and not wanted.is_stream:
        raise InferError(
            "predict is a generator, so it is called once, with an iterator over the batches: "
            f"annotate it as Iterator[{wanted.kind}], and yield one output per batch"
        )


# ── a module of torch ────────────────────────────────────────────────────────────────────────────


class _ModuleCaller(Caller):
    """An ``nn.Module``: called in eval mode, without gradients, with tensors on its parameters' device."""

    def __init__(self, module: Any) -> None:
        super().__init__(module.eval(), wanted_by(module.forward, otherwise=TENSOR).kind)
        self.module = module

    def outputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        import torch

        for batch in batches:
            with torch.inference_mode():
                output = self._predict(batch)
            yield output


# ── an iterator over batches ─────────────────────────────────────────────────────────────────────


class _StreamCaller(Caller):
    """A ``predict`` that takes an iterator of batches and yields one output for each.

    One call lasts as long as the rank, since its set-up before the loop should run once. If it reads ahead,
    it asks for a batch that has not arrived yet; its iterator then ends, it yields its pending outputs, and
    the next chunk makes a new call.
    """

    def __init__(self, predict: Callable[[Any], Any], kind: str) -> None:
        super().__init__(predict, kind)
        self._answers: Any = None
        self._source: Iterator[Any] = iter(())
        self._waiting: list[Any] = []
        """The batch for the next output, not taken yet."""
        self._owed = 0
        """Batches taken without an output so far."""
        self._has_ended = False
        """Whether the iterator that ``predict`` reads has ended."""

    def outputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._owed or self._waiting:  # the last chunk was abandoned
            self.close()
        self._source = iter(batches)
        for batch in self._source:
            self._waiting = [batch]
            yield self._answer()
            while self._owed:  # it reads ahead
                yield self._answer()
        if self._has_ended:
            self._finish()

    def close(self) -> None:
        answers, self._answers = self._answers, None
        self._waiting, self._owed, self._has_ended = [], 0, False
        if hasattr(answers, "close"):
            answers.close()

    def _feed(self) -> Iterator[Any]:
        while True:
            if not self._waiting:
                self._waiting = list(islice(self._source, 1))
            if not self._waiting:
                break
            self._owed += 1
            yield self._waiting.pop()
        self._has_ended = True

    def _answer(self) -> Any:
        try:
            if self._answers is None:
                self._answers = self._start()
            output = next(self._answers, _NOTHING)
        except BaseException:
            self.close()
            raise
        if output is _NOTHING or not self._owed:
            self.close()
            raise InferError(_ENDED_EARLY if output is _NOTHING else _ONE_TOO_MANY)
        self._owed -= 1
        return output

    def _start(self) -> Any:
        answers = self._predict(self._feed())
        if not hasattr(answers, "__next__"):
            raise InferError(
                "predict takes an iterator of batches, so it has to yield one output for each "
                f"batch; it returned a {describe(answers)}"
            )
        return answers

    def _finish(self) -> None:
        """Run the code after the loop."""
        is_over = next(self._answers, _NOTHING) is _NOTHING
        self.close()
        if not is_over:
            raise InferError(_ONE_TOO_MANY)


_NOTHING = object()
_ENDED_EARLY = (
    "predict returned before it had yielded an output for each batch: yield one output per "
    "batch, until there are no more batches"
)
_ONE_TOO_MANY = "predict yielded more than one output for a batch: yield one output per batch"
