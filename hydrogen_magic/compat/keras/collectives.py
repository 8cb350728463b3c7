"""The exchanges of Keras's backend in this process."""

from __future__ import annotations

from hydrogen_magic.compat.keras.jax_exchange import JaxExchange
from hydrogen_magic.compat.keras.torch_exchange import TorchExchange


def exchange() -> TorchExchange | JaxExchange:
    """Return the exchanges of Keras's backend here. Raises RuntimeError if it is not supported."""
    import keras

    backend = keras.config.backend()
    if backend == "torch":
        return TorchExchange()
    if backend == "jax":
        return JaxExchange()
    raise RuntimeError(
        f"Keras uses the backend {backend!r} here, but hydrogen_magic.compat.keras needs torch or JAX: "
        'set os.environ["KERAS_BACKEND"] = "torch" in the notebook, before Keras is imported'
    )


def init() -> None:
    """Join the other ranks; does nothing in a plain process, or if this rank has joined.

    Keras uses this rank's own GPU afterwards, if it has one. Raises RuntimeError if Keras uses another
    backend than torch or JAX, or if the gang's rendezvous is not that of the backend.
    """
    exchange().init()


def shutdown() -> None:
    """Leave the other ranks."""
    exchange().shutdown()
