"""Settings of numpy, pandas, scikit-learn, matplotlib, Keras and JAX."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from hydrogen_magic.node.worker.settings.provider import (
    Provider,
    Stays,
    Undo,
    Value,
    functions,
    table,
)
from hydrogen_magic.serialization.closure import Setting

_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_NUMPY_PRINT = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "formatter": None,
    "legacy": False,
}


def _read_numpy(numpy: Any) -> Iterator[Setting | Stays]:
    for function, found, defaults in (
        ("seterr", numpy.geterr(), _NUMPY_ERRORS),
        ("set_printoptions", numpy.get_printoptions(), _NUMPY_PRINT),
    ):
        for name, default in defaults.items():
            if found.get(name, default) != default:
                yield Setting("numpy", "numpy", f"{function}({name})", found[name])


def _apply_numpy(numpy: Any, key: str, value: Any) -> Undo:
    function, _, name = key.rstrip(")").partition("(")
    before = numpy.geterr() if function == "seterr" else numpy.get_printoptions()
    getattr(numpy, function)(**{name: value})
    return partial(getattr(numpy, function), **{name: before[name]})


def _read_pandas(pandas: Any) -> Iterator[Setting | Stays]:
    config = sys.modules["pandas._config.config"]
    for key, option in config._registered_options.items():
        found = config._global_config
        for part in key.split("."):
            found = found[part]
        if found is not option.defval and found != option.defval:
            yield Setting("pandas", "pandas", key, found)


def _apply_pandas(pandas: Any, key: str, value: Any) -> Undo:
    before = pandas.get_option(key)
    pandas.set_option(key, value)
    return partial(pandas.set_option, key, before)


def _read_sklearn(sklearn: Any) -> Iterator[Setting | Stays]:
    # Of this process, with the variables SKLEARN_…; set_config changes each thread's own copy.
    defaults = sys.modules["sklearn._config"]._global_config
    for key, found in sklearn.get_config().items():
        if found != defaults[key]:
            yield Setting("sklearn", "sklearn", key, found)


def _apply_sklearn(sklearn: Any, key: str, value: Any) -> Undo:
    before = sklearn.get_config()[key]
    sklearn.set_config(**{key: value})
    return partial(sklearn.set_config, **{key: before})


_OF_FRONT_END = ("backend", "interactive", "toolbar", "webagg.", "tk.", "savefig.directory")
"""Beginnings of rcParams that depend on where figures are shown."""


def _read_matplotlib(matplotlib: Any) -> Iterator[Setting | Stays]:
    defaults = matplotlib.rcParamsDefault
    for key, value in dict.items(matplotlib.rcParams):
        # Not by [], which chooses a backend.
        if key.startswith(_OF_FRONT_END) or value == dict.__getitem__(defaults, key):
            continue
        is_cycle = type(value).__name__ == "Cycler"  # matplotlib also reads its text
        yield Setting("matplotlib", "matplotlib", key, repr(value) if is_cycle else value)


def _apply_matplotlib(matplotlib: Any, key: str, value: Any) -> Undo:
    before = matplotlib.rcParams[key]
    matplotlib.rcParams[key] = value
    return partial(matplotlib.rcParams.__setitem__, key, before)


_KERAS = {
    "floatx": functions("config.floatx", "config.set_floatx", "float32"),
    "epsilon": functions("config.epsilon", "config.set_epsilon", 1e-7),
    "image data format": functions(
        "config.image_data_format", "config.set_image_data_format", "channels_last"
    ),
    "dtype policy": Value(
        lambda keras: keras.config.dtype_policy().name,
        lambda keras, value: keras.config.set_dtype_policy(value),
        "float32",
    ),
}


def _jax_option(name: str, default: Any) -> Value:
    return Value(
        lambda jax: getattr(jax.config, name, default),  # each version has its own options
        lambda jax, value: jax.config.update(name, value),
        default,
    )


_JAX = {
    name: _jax_option(name, default)
    for name, default in {
        "jax_enable_x64": False,
        "jax_default_matmul_precision": None,
        "jax_default_prng_impl": "threefry2x32",
        "jax_numpy_dtype_promotion": "standard",
        "jax_debug_nans": False,
        "jax_debug_infs": False,
        "jax_disable_jit": False,
        "jax_numpy_rank_promotion": "allow",
        "jax_random_seed_offset": 0,
        "jax_threefry_partitionable": True,
    }.items()
}


PROVIDERS = {
    "numpy": Provider(_read_numpy, _apply_numpy),
    "pandas": Provider(_read_pandas, _apply_pandas),
    "sklearn": Provider(_read_sklearn, _apply_sklearn),
    "matplotlib": Provider(_read_matplotlib, _apply_matplotlib),
    "keras": table("keras", _KERAS),
    "jax": table("jax", _JAX),
}
