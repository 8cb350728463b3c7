"""A notebook with custom objects of Keras: ``python -m tests.keras_notebook`` prints what it found as JSON.

A process of its own: Keras has one backend, and one registry of classes.
"""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

import hydrogen_magic as hm
from hydrogen_magic.capture import capture_call
from hydrogen_magic.errors import CaptureError
from tests.local import test_compat_keras


@keras.saving.register_keras_serializable("mine")
class Doubled(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return 2 * x


class Scaled(keras.layers.Layer):
    def __init__(self, by: float, **options: Any) -> None:
        super().__init__(**options)
        self.by = by

    def call(self, x: Any) -> Any:
        return self.by * x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by": self.by}


def shifted(x: Any) -> Any:
    return x + 1


def error_of(y: Any, found: Any) -> Any:
    return keras.ops.mean((y - found) ** 2)


keras.config.set_epsilon(0.1)
keras.config.set_image_data_format("channels_first")
X = np.arange(8, dtype=np.float32).reshape(2, 4)
MODEL = keras.Sequential(
    [
        keras.Input((4,)),
        Doubled(),
        Scaled(3.0),
        # With random weights, softplus may be 0 for all rows, and no step changes that.
        keras.layers.Dense(2, activation=shifted, kernel_initializer="ones"),
        keras.layers.Dense(1, activation="softplus", kernel_initializer="ones"),
    ]
)
MODEL.compile("adam", error_of)
ALONE = Doubled()
EXPECTED = MODEL.predict(X, verbose=0)


def softplus(x: Any) -> Any:
    """No activation of the model: that is Keras' own."""
    return x - 100


def shifted(x: Any) -> Any:
    """Defined again: the model has the earlier one."""
    return x - 100


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled(2.0)

    def call(self, x: Any) -> Any:
        return self.scaled(x)


class Revived(Subclassed):
    def __init__(self, **options: Any) -> None:
        keras.Model.__init__(self, **options)
        self.scaled = Scaled(2.0)


SUBCLASSED, REVIVED = Subclassed(), Revived()
REVIVED(X)


def refusal() -> str:
    try:
        capture_call(lambda: SUBCLASSED, (), {})
    except CaptureError as error:
        return str(error)
    return ""


def on_rank() -> Any:
    found = MODEL.predict(X, verbose=0)
    is_same = isinstance(MODEL.layers[0], Doubled) and isinstance(ALONE, Doubled)
    again = MODEL.fit(X, np.zeros((2, 1), np.float32), verbose=0).history["loss"]
    is_same = is_same and np.allclose(REVIVED(X), 2 * X)
    assert (keras.config.epsilon(), keras.config.image_data_format()) == (0.1, "channels_first")
    return found, is_same, softplus(0), MODEL, again


def main() -> None:
    gang = hm.launch(on_rank, np=1)
    found, is_same, of_softplus, model, losses = gang.result
    after = model.predict(X, verbose=0)
    results = {
        "arrives": np.allclose(found, EXPECTED),
        "has the classes": is_same and of_softplus == -100,
        "comes back": type(model.layers[0]) is Doubled and type(model.layers[1]) is Scaled,
        "is the trained one": not np.allclose(after, EXPECTED) and len(losses) == 1,
        "keeps functions": model.layers[2].activation(0) == 1,
        "keeps attributes": model.layers[1].by == 3.0,
        "arrives without warnings": "UserWarning" not in gang.logs[0],
        "is refused if it cannot be loaded": "let __init__ accept **kwargs" in refusal(),
    }
    test_compat_keras.check_that_torch_averages_gradients()
    print(json.dumps({name: bool(value) for name, value in results.items()}))


if __name__ == "__main__":
    main()
