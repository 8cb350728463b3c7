"""All forms of ``predict``, called in the same way: batches in, one output for each, in order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from hydrogen_magic.core.lazy_annotations import signature_of
from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.annotations import TENSOR, BatchType, batch_type_of
from hydrogen_magic.serialization.object_paths import describe


class Caller:
    """A ``predict`` that is called with every batch."""

    def __init__(self, predict: Callable[[Any], Any], kind: str) -> None:
        self.kind = kind
        """The kind of its batches, one of :mod:`annotations`."""
        self.module: Any = None
        """The ``nn.Module``, if ``predict`` is one."""
        self._predict = predict

    def outputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield one output for each of ``batches``, which are taken one by one."""
        for batch in batches:  # a StopIteration of predict would end a map
            yield self._predict(batch)

    def close(self) -> None:
        """Let ``predict`` clean up."""


def caller_of(predict: Any) -> Caller:
    """Return how to call ``predict``. Raises InferError if it cannot be called."""
    _check_callable(predict)
    if is_a(predict, "torch.nn", "Module"):
        return _ModuleCaller(predict)
    function = _function_of(predict)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise InferError("predict is async, but batches are predicted one by one: remove async")
    batch_type = batch_type_of(predict)
    if inspect.isgeneratorfunction(function):
        _check_takes_iterator(predict, batch_type)
        return _StreamCaller(predict, batch_type.kind)
    return (_StreamCaller if batch_type.is_stream else Caller)(predict, batch_type.kind)


def _check_callable(predict: Any) -> None:
    if predict is None:
        raise InferError(
            "the cell defines no predict: add a function def predict(batch): …, or assign a model, as"
            " in predict = model"
        )
    if isinstance(predict, type):
        raise InferError(
            f"predict is the class {predict.__qualname__}: create an instance in the cell, "
            f"predict = {predict.__name__}()"
        )
    if not callable(predict):
        has_method = callable(getattr(predict, "predict", None))
        remedy = "predict = model.predict" if has_method else "def predict(batch): …"
        raise InferError(
            f"predict is a {describe(predict)}, which cannot be called: write {remedy}"
        )


def _function_of(predict: Any) -> Any:
    """Return the function of a partial or of a callable instance."""
    while isinstance(predict, functools.partial):
        predict = predict.func
    return predict if inspect.isroutine(predict) else getattr(predict, "__call__", predict)  # noqa: B004


def _check_takes_iterator(predict: Any, batch_type: BatchType) -> None:
    parameters = signature_of(predict).parameters.values()
    is_annotated = any(each.annotation is not inspect.Parameter.empty for each in parameters)
    if is_annotated and not batch_type.is_stream:
        raise InferError(
            "predict has a yield, so it is called once with an iterator over the batches: annotate it as"
            f" Iterator[{batch_type.kind}], and yield one output per batch"
        )


class _ModuleCaller(Caller):
    """An ``nn.Module``: in eval mode, without gradients, with tensors on its device."""

    def __init__(self, module: Any) -> None:
        self._modes = [(each, each.training) for each in module.modules()]
        super().__init__(module.eval(), batch_type_of(module.forward, default=TENSOR).kind)
        self.module = module

    def outputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        import torch

        for batch in batches:
            # inference_mode would mark caches of a model that is trained next.
            with torch.no_grad():
                output = self._predict(batch)
            yield output

    def close(self) -> None:
        """Set each module's mode to what it was: the next cell of a session may train the model."""
        for module, is_training in self._modes:
            module.training = is_training


# ── an iterator over batches ─────────────────────────────────────────────────────────────────────


class OutOfStepError(InferError):
    """A ``predict`` over an iterator did not yield one output for each batch.

    Which batch has none is unknown, so earlier outputs may be those of other batches.
    """


class _StreamCaller(Caller):
    """A ``predict`` that takes an iterator over batches and yields one output for each.

    One call lasts as long as the rank, so that set-up before its loop runs once. A ``predict`` that reads
    ahead asks for a batch that has not arrived; then its iterator ends, it yields the missing outputs, and
    the next chunk starts a new call.
    """

    def __init__(self, predict: Callable[[Any], Any], kind: str) -> None:
        super().__init__(predict, kind)
        self._outputs: Any = None
        self._source: Iterator[Any] = iter(())
        self._next_batch: list[Any] = []
        """The batch of the next output, until ``predict`` takes it."""
        self._n_missing = 0
        """Batches that were taken and have no output yet."""
        self._has_ended = False
        """Whether the iterator that ``predict`` reads has ended."""

    def outputs(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._n_missing or self._next_batch:  # a batch has failed
            self._end_call()
        self._source = iter(batches)
        for batch in self._source:
            self._next_batch = [batch]
            yield self._output()
            while self._n_missing:  # it reads ahead
                yield self._output()
        if self._has_ended:
            self._finish()

    def _end_call(self) -> None:
        """End a call of which no further output is needed; raise OutOfStepError if it has skipped a batch."""
        n_missing, self._source, self._next_batch = self._n_missing, iter(()), []
        try:
            n_more = sum(1 for _ in islice(self._outputs, n_missing))
        except Exception:  # of a batch that counts as failed already
            n_more = n_missing
        finally:
            self.close()
        if n_more < n_missing:
            raise OutOfStepError(_TOO_FEW)

    def close(self) -> None:
        outputs, self._outputs = self._outputs, None
        self._next_batch, self._n_missing, self._has_ended = [], 0, False
        if hasattr(outputs, "close"):
            outputs.close()

    def _batches(self) -> Iterator[Any]:
        while True:
            if not self._next_batch:
                self._next_batch = list(islice(self._source, 1))
            if not self._next_batch:
                break
            self._n_missing += 1
            yield self._next_batch.pop()
        self._has_ended = True

    def _output(self) -> Any:
        try:
            if self._outputs is None:
                self._outputs = self._call()
            output = next(self._outputs, _NOTHING)
        except BaseException:
            self.close()
            raise
        if output is _NOTHING or not self._n_missing:
            self.close()
            raise OutOfStepError(_TOO_FEW if output is _NOTHING else _TOO_MANY)
        self._n_missing -= 1
        return output

    def _call(self) -> Any:
        outputs = self._predict(self._batches())
        if not hasattr(outputs, "__next__"):
            raise InferError(
                "predict takes an iterator over batches, so it must yield one output for each; it"
                f" returned a {describe(outputs)}"
            )
        return outputs

    def _finish(self) -> None:
        """Run the code after the loop."""
        is_over = next(self._outputs, _NOTHING) is _NOTHING
        self.close()
        if not is_over:
            raise OutOfStepError(_TOO_MANY)


_NOTHING = object()
_TOO_FEW = (
    "predict returned before it had yielded an output for each batch: yield one output per batch until"
    " the iterator ends"
)
_TOO_MANY = "predict yielded more than one output for a batch: yield one output per batch"
