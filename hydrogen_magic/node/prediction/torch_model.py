"""A torch model and its features: the input of a training step, and a ``predict`` for batches of columns.

Both are made of columns by the same function, so a model predicts from tensors like those that it was
trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.annotations import TENSOR, TENSORS, batch_type_of
from hydrogen_magic.node.prediction.inputs import ModuleInput
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.data.batch_kinds import ColumnError, arrays_of, exact_tensors_of

if TYPE_CHECKING:
    import pyarrow as pa


class FeatureColumns:
    """Makes the features of a model, which is on its device already, from a batch of columns.

    They are one tensor: numbers and vectors side by side, or the only column as it is if it has further
    dimensions. A ``forward`` that is annotated with a dict, or takes several arguments, gets each column as
    a tensor of its own.
    """

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        self._names = names
        self._has_arguments = takes_arguments(model)
        self._is_one_tensor = not self._has_arguments and _kind_of_input(model) != TENSORS
        self._input = ModuleInput(model)

    def of(self, batch: Mapping[str, Any]) -> Any:
        """Return a tensor, or a dict of tensors by column. Raises InferError if one has no tensor."""
        columns = {name: batch[name] for name in self._names}
        for name, column in columns.items():
            _check(name, column)
        # Moved first, since torch makes float32 of an int64 beside a float32.
        moved = self._input.moved(columns)
        return _side_by_side(moved) if self._is_one_tensor else moved

    def label(self, values: Any) -> Any:
        """Return labels in torch's default type if they are float64 and the model is not."""
        import torch

        is_wide = values.dtype == torch.float64 != self._input.dtype
        return values.to(torch.get_default_dtype()) if is_wide else values

    def call(self, model: Any, features: Any) -> Any:
        """Return the output of ``model`` for :meth:`of`."""
        return model(*features.values()) if self._has_arguments else model(features)


def takes_arguments(model: Any) -> bool:
    """Return whether ``forward`` needs several arguments: one for each column."""
    try:
        _kind_of_input(model)
    except InferError:
        return True
    return False


def _kind_of_input(model: Any) -> str:
    return batch_type_of(model.forward, default=TENSOR).kind


def _check(name: str, column: Any) -> None:
    import torch

    if not isinstance(column, torch.Tensor):
        raise InferError(
            f"the arrays of column {name!r} differ in length, so they form no tensor: pad them"
        )
    if len(column) and not column.numel():
        raise InferError(
            f"column {name!r} has no number in a batch, whose arrays are all null or empty: fill them, or "
            "drop these rows"
        )


def _side_by_side(columns: Mapping[str, Any]) -> Any:
    import torch

    tensors = list(columns.values())
    if len(tensors) == 1 and tensors[0].dim() > 1:
        return tensors[0]
    parts = [each.unsqueeze(1) if each.dim() == 1 else each for each in tensors]
    if any(part.dim() > 2 for part in parts):
        shapes = ", ".join(f"{name} {tuple(each.shape[1:])}" for name, each in columns.items())
        raise InferError(
            f"the columns {shapes} cannot be put side by side: annotate the input of the model's forward "
            "as dict[str, torch.Tensor], or give it one argument for each column"
        )
    return torch.cat(parts, dim=1)


class ModelPredict:
    """A ``predict`` that calls a model with the features of a batch, in eval mode, without gradients.

    Args:
        model: An ``nn.Module``; it is moved to the device of the process at the first batch.
        names: Columns of the features.
        column: Name of the predicted column, if the output is not a dict of columns.
        predict: Called with the model and the features; None calls the model.
    """

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        column: str,
        predict: Callable[[Any, Any], Any] | None,
    ) -> None:
        self._model = model
        self._names = names
        self._column = column
        self._predict = predict
        self._columns: FeatureColumns | None = None
        self.names_columns = False
        """Whether the last output was a dict of columns."""

    def __call__(self, batch: pa.Table) -> Any:
        import torch

        columns = self._ready()
        try:
            tensors = exact_tensors_of(arrays_of(batch.select(self._names)))
        except ColumnError as error:
            raise error.of_frame() from None
        with torch.no_grad():  # inference_mode would mark caches of a model that is trained next
            call = self._predict or columns.call
            output = call(self._model, columns.of(tensors))
        self.names_columns = isinstance(output, Mapping)
        is_whole = output is None or self.names_columns
        return output if is_whole else {self._column: output}

    def _ready(self) -> FeatureColumns:
        if self._columns is None:
            self._model = self._model.to(api.device()).eval()
            self._columns = FeatureColumns(self._model, self._names)
        return self._columns
