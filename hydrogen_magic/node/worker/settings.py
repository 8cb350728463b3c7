"""Notebook-wide settings: read in the kernel, applied on every rank.

A provider knows the settings of one library: it reads those that differ from the library's defaults, and
applies them. A library that a process has not imported is never imported for this: the kernel has no settings
of it, and a rank applies them after the import.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, TypeGuard

from hydrogen_magic.core import processes
from hydrogen_magic.node.worker.import_hooks import hooks
from hydrogen_magic.serialization.closure import Setting
from hydrogen_magic.serialization.instances import find_on_type


@dataclass(frozen=True)
class Stays:
    """A setting that is not sent."""

    name: str
    """What the user knows it by."""


Undo = Callable[[], object]


@dataclass(frozen=True)
class _Provider:
    read: Callable[[Any], Iterator[Setting | Stays]]
    """Return the settings of this process that differ from the defaults."""
    apply: Callable[[Any, str, Any], Undo]
    """Apply one setting, given the module, the key and the value."""


def read() -> list[Setting | Stays]:
    """Return the settings of this process that differ from the libraries' defaults. Imports nothing."""
    found: list[Setting | Stays] = []
    for name, provider in _PROVIDERS.items():
        module = sys.modules.get(name)
        try:
            found += [] if module is None else provider.read(module)
        except Exception as error:  # another version of the library
            found.append(Stays(f"those of {name} ({type(error).__name__}: {error})"))
    return found


def concerns_imports(setting: Setting) -> bool:
    """Whether the setting should be applied before the notebook's imports, whose warnings it hides."""
    return setting.provider == "warnings" and setting.value[0] != "error"


def apply(settings: Iterable[Setting], warn: Callable[[str], object]) -> ExitStack:
    """Apply ``settings`` to this process; closing the result undoes it.

    ``warn``: called with a message for each setting that cannot be applied.
    """
    undo = ExitStack()
    undo.callback(hooks.remove)
    for setting in settings:
        _apply_once_imported(setting, undo, warn)
    return undo


class NotebookSettings:
    """The notebook's settings on a rank that runs several cells.

    What the rank's own cells have set stays until the notebook changes the same setting. Settings that a
    cell no longer brings are undone: the notebook has them at their defaults again. Attributes of modules
    have no default, and a cell that does not use a module may not bring them.
    """

    def __init__(self) -> None:
        self._undo: dict[str, ExitStack] = {}
        """By label."""
        self._applied: dict[str, tuple[str, str, Any]] = {}
        """By label: the digest of the value, the module, and its spec then, which a reload replaces."""

    def apply(
        self,
        settings: Iterable[Setting],
        digests: Mapping[str, str],
        warn: Callable[[str], object],
    ) -> None:
        """Apply some of the cell's settings; ``digests``: see :attr:`SessionSends.settings`.

        ``warn``: as in :func:`apply`.
        """
        for setting in settings:
            label, digest = setting.label, digests.get(setting.label)
            if self.is_applied(label, digest):
                continue
            undo, is_first = ExitStack(), label not in self._undo
            if setting.provider != "attribute" and (is_first or setting.module not in sys.modules):
                undo = self._undo.setdefault(label, undo)
            _apply_once_imported(setting, undo, warn)
            if digest is not None:
                hooks.add(setting.module, partial(self._note, label, digest, setting.module))

    def _note(self, label: str, digest: str, name: str, module: types.ModuleType) -> None:
        self._applied[label] = digest, name, getattr(module, "__spec__", None)

    def is_applied(self, label: str, digest: str | None) -> bool:
        """Whether the rank has got a setting with this value since it last loaded the module."""
        applied, name, spec = self._applied.get(label, (None, "", None))
        module = sys.modules.get(name)
        is_same = module is not None and getattr(module, "__spec__", None) is spec
        return digest is not None and digest == applied and is_same

    def undo_others(self, labels: Collection[str], warn: Callable[[str], object]) -> None:
        """Undo what earlier cells have brought, except for the settings with these ``labels``."""
        for label in self._undo.keys() - labels:
            self._applied.pop(label, None)
            try:
                self._undo.pop(label).close()
            except Exception as error:  # a cell has removed what the setting belongs to
                raised = f"{type(error).__name__}: {error}"
                warn(f"the notebook's earlier setting {label} cannot be undone: {raised}")


def _apply_once_imported(setting: Setting, undo: ExitStack, warn: Callable[[str], object]) -> None:
    """Apply a setting now, or after the import of its library."""
    hook = partial(_apply, setting, undo, warn)
    undo.callback(hooks.cancel, setting.module, hook)
    hooks.add(setting.module, hook)


def _apply(
    setting: Setting, undo: ExitStack, warn: Callable[[str], object], module: types.ModuleType
) -> None:
    try:
        undo.callback(_PROVIDERS[setting.provider].apply(module, setting.key, setting.value))
    except Exception as error:  # another version of the library, an attribute that cannot be set
        raised = f"{type(error).__name__}: {error}"
        warn(f"the notebook's {setting.provider} setting {setting.key} is not applied: {raised}")


_ATOMS = (int, float, complex, bool, type(None))
_MAX_LENGTH = 10_000
"""Characters or items; longer values travel with the notebook's other values, whose size is limited."""
_MAX_DEPTH = 8


def is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether ``value`` is small and of Python's own types, so that any process can unpickle it."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind not in (str, bytes, list, tuple, dict) or len(value) > _MAX_LENGTH or depth == 0:
        return False
    if kind in (str, bytes):
        return True
    items = [*value.keys(), *value.values()] if kind is dict else value
    return all(is_plain(item, depth - 1) for item in items)


@dataclass(frozen=True)
class _Value:
    """A setting that is read and written by functions of its library."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    default: Any


def _table(
    provider: str, values: dict[str, _Value]
) -> tuple[Callable[[Any], Iterator[Setting | Stays]], Callable[[Any, str, Any], Undo]]:
    """Return how to read and apply the settings of a table."""

    def read(module: Any) -> Iterator[Setting | Stays]:
        for key, value in values.items():
            found = value.get(module)
            if found != value.default:
                yield Setting(provider, module.__name__, key, found)

    def apply(module: Any, key: str, value: Any) -> Undo:
        before = values[key].get(module)
        values[key].set(module, value)
        return partial(values[key].set, module, before)

    return read, apply


def _functions(get: str, change: str, default: Any) -> _Value:
    """Return a value that two functions of the module read and write."""
    return _Value(
        lambda module: attrgetter(get)(module)(),
        lambda module, value: attrgetter(change)(module)(value),
        default,
    )


def _attribute(owner: Callable[[Any], Any], name: str, default: Any) -> _Value:
    """Return a value that is an attribute of what ``owner`` finds in the module."""
    return _Value(
        lambda module: getattr(owner(module), name),
        lambda module, value: setattr(owner(module), name, value),
        default,
    )


# ── Python ───────────────────────────────────────────────────────────────────────────────────────

_SYS = {"recursion limit": _functions("getrecursionlimit", "setrecursionlimit", 1000)}


def _start_method(multiprocessing: Any) -> str | None:
    """Return the start method unless it is the default, which the first use makes the chosen one."""
    method: str | None = multiprocessing.get_start_method(allow_none=True)
    return None if method == multiprocessing.get_all_start_methods()[0] else method


_MULTIPROCESSING = {
    "start method": _Value(
        _start_method,
        lambda module, value: module.set_start_method(value, force=True),
        None,
    )
}


def _traps(decimal: Any) -> tuple[str, ...]:
    traps = decimal.getcontext().traps
    return tuple(sorted(signal.__name__ for signal, is_trapped in traps.items() if is_trapped))


def _set_traps(decimal: Any, names: Sequence[str]) -> None:
    traps = decimal.getcontext().traps
    for signal in list(traps):
        traps[signal] = signal.__name__ in names


_context = methodcaller("getcontext")
_DECIMAL = {
    "precision": _attribute(_context, "prec", 28),
    "rounding": _attribute(_context, "rounding", "ROUND_HALF_EVEN"),
    "Emin": _attribute(_context, "Emin", -999999),
    "Emax": _attribute(_context, "Emax", 999999),
    "capitals": _attribute(_context, "capitals", 1),
    "clamp": _attribute(_context, "clamp", 0),
    "traps": _Value(_traps, _set_traps, ("DivisionByZero", "InvalidOperation", "Overflow")),
}

_LOCALE = ("LC_COLLATE", "LC_MONETARY", "LC_NUMERIC", "LC_TIME")
"""Categories that are those of C in any process until it changes them."""


def _read_locale(locale: Any) -> Iterator[Setting | Stays]:
    for name in _LOCALE:
        found = locale.setlocale(getattr(locale, name))
        # Qt and R take the locale of the environment; what a user chooses is another one.
        given = next(filter(None, map(os.environ.get, ("LC_ALL", name, "LANG"))), "C")
        if found not in ("C", "POSIX", given):
            yield Setting("locale", "locale", name, found)


def _apply_locale(locale: Any, key: str, value: Any) -> Undo:
    category = getattr(locale, key)
    before = locale.setlocale(category)
    locale.setlocale(category, value)
    return partial(locale.setlocale, category, before)


# ── torch ────────────────────────────────────────────────────────────────────────────────────────


def _default_threads() -> set[int]:
    """Return the numbers of threads that torch may choose by itself on this machine."""
    given = {os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # The mathematical libraries start one thread for each core.
    cores = (os.cpu_count() or 1, processes.usable_cores())
    counts = {count // per for count in cores for per in (1, _threads_per_core())}
    return counts | {int(text) for text in given if text.isdigit()}


@cache
def _threads_per_core() -> int:
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    return len(re.split("[,-]", siblings.read_text())) if siblings.exists() else 1


def _threads(torch: Any) -> int | None:
    count = int(torch.get_num_threads())
    return None if count in _default_threads() else count


def _set_device(torch: Any, kind: str | None) -> None:
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("the rank has no GPU")
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.set_default_device(kind)


_cudnn = attrgetter("backends.cudnn")
_TORCH = {
    "default dtype": _Value(
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
        "float32",
    ),
    "default device": _Value(lambda torch: torch.get_default_device().type, _set_device, "cpu"),
    "grad mode": _functions("is_grad_enabled", "set_grad_enabled", True),
    "anomaly detection": _functions("is_anomaly_enabled", "autograd.set_detect_anomaly", False),
    "deterministic algorithms": _Value(
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (False, False),
    ),
    "float32 matmul precision": _functions(
        "get_float32_matmul_precision", "set_float32_matmul_precision", "highest"
    ),
    "sharing strategy": _functions(
        "multiprocessing.get_sharing_strategy",
        "multiprocessing.set_sharing_strategy",
        "file_descriptor",
    ),
    "number of threads": _Value(
        _threads, lambda torch, value: value and torch.set_num_threads(value), None
    ),
    "cudnn.deterministic": _attribute(_cudnn, "deterministic", False),
    "cudnn.benchmark": _attribute(_cudnn, "benchmark", False),
    "cudnn.enabled": _attribute(_cudnn, "enabled", True),
    "print options": _Value(
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda torch, value: torch.set_printoptions(**value),
        {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
    ),
}


# ── numpy ────────────────────────────────────────────────────────────────────────────────────────

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
    if numpy.geterrcall() is not None:
        yield Stays("the handler of numpy.seterrcall")


def _apply_numpy(numpy: Any, key: str, value: Any) -> Undo:
    function, _, name = key.rstrip(")").partition("(")
    before = numpy.geterr() if function == "seterr" else numpy.get_printoptions()
    getattr(numpy, function)(**{name: value})
    return partial(getattr(numpy, function), **{name: before[name]})


# ── pandas, scikit-learn, matplotlib, keras ──────────────────────────────────────────────────────


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
    "floatx": _functions("config.floatx", "config.set_floatx", "float32"),
    "dtype policy": _Value(
        lambda keras: keras.config.dtype_policy().name,
        lambda keras, value: keras.config.set_dtype_policy(value),
        "float32",
    ),
}


def _jax_option(name: str, default: Any) -> _Value:
    return _Value(
        lambda jax: getattr(jax.config, name),
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
    }.items()
}


# ── logging ──────────────────────────────────────────────────────────────────────────────────────

_OWN_LOGGERS = re.compile(
    r"(asyncio|IPython|ipykernel|jedi|parso|prompt_toolkit|tornado|traitlets|zmq|Comm|comm|"
    r"hydrogen_magic|[A-Za-z]+App|alembic|huey|sqlalchemy\.engine)(\.|$)|c10d-|strobelight_"
)
"""Those of the notebook's own machinery, of torch under other names, and those that MLflow configures."""
_OWN_HANDLERS = {"absl", "_pytest", "ipykernel", "IPython", "hydrogen_magic", "mlflow"}
"""Packages that add handlers to the root logger, or to those of others, when they are imported."""


def _read_logging(module: Any) -> Iterator[Setting | Stays]:
    root = logging.getLogger()
    if root.manager.disable:
        yield Setting("logging", "logging", "disable", root.manager.disable)
    if getattr(logging, "_warnings_showwarning", None) is not None:
        yield Setting("logging", "logging", "captureWarnings", True)
    if _level_names() != _PYTHONS_LEVELS:
        yield Setting("logging", "logging", "level names", _level_names())
    for name, logger in [("root", root), *root.manager.loggerDict.items()]:
        # Of hundreds of loggers nearly all are as they were made, so that is looked at first.
        if _is_configured(logger) and not _OWN_LOGGERS.match(name):
            yield from _read_logger(name, logger)


def _level_names() -> dict[int, str]:
    return {level: logging.getLevelName(level) for level in sorted(logging._levelToName)}


_PYTHONS_LEVELS = {0: "NOTSET", 10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}


def _name_levels(names: Mapping[int, str]) -> None:
    for level in _level_names().keys() - names.keys():
        logging._nameToLevel.pop(logging._levelToName.pop(level), None)
    for level, name in names.items():
        logging.addLevelName(level, name)


def _filters(owner: logging.Filterer) -> list[Any]:
    """Return the notebook's filters; libraries add theirs when they are imported."""
    return [
        one
        for one in owner.filters
        if type(one) is logging.Filter
        or "__main__" in (type(one).__module__, getattr(one, "__module__", None))
    ]


def _is_configured(logger: logging.Logger | logging.PlaceHolder) -> TypeGuard[logging.Logger]:
    return isinstance(logger, logging.Logger) and bool(
        logger.level or logger.handlers or logger.filters or logger.disabled or not logger.propagate
    )


def _read_logger(name: str, logger: logging.Logger) -> Iterator[Setting | Stays]:
    home = name.partition(".")[0]
    module = sys.modules.get(home) if name != "root" else None
    filters = _filters(logger)
    if "-packages" in str(getattr(module, "__file__", "")):
        # A library configures its loggers when it is imported; users change their levels.
        if logger.level or filters:
            of_library: Any = (logger.level, logger.propagate, logger.disabled, [], filters)
            yield Setting("logging", home, name, of_library)
        return
    handlers = []
    for handler in logger.handlers:
        stream = _stream_name(handler)
        makers = (type(handler), type(getattr(handler, "stream", None)))
        owners = {maker.__module__.partition(".")[0] for maker in makers}
        if stream is not None:
            formatter = _formatter(handler.formatter)
            kept = None if isinstance(formatter, Stays) else formatter
            handlers.append((stream, handler.level, kept, _filters(handler)))
            yield from (one for one in [formatter] if isinstance(one, Stays))
        elif not isinstance(handler, logging.NullHandler) and not owners & _OWN_HANDLERS:
            yield Stays(f"the {type(handler).__name__} of the logger {name!r}")
    default = logging.WARNING if name == "root" else logging.NOTSET
    state = (logger.level, logger.propagate, logger.disabled, handlers, filters)
    if state != (default, True, False, [], []):
        yield Setting("logging", "logging" if module is None else home, name, state)


def _stream_name(handler: logging.Handler) -> str | None:
    """Return ``stdout`` or ``stderr`` for a plain handler of such a stream."""
    if type(handler) is not logging.StreamHandler:
        return None
    for name in ("stdout", "stderr"):
        streams = (getattr(sys, name), getattr(sys, f"__{name}__"))
        if handler.stream in streams or getattr(handler.stream, "name", "") in (name, f"<{name}>"):
            return name
    return None


def _formatter(formatter: logging.Formatter | None) -> Any:
    """Return a formatter in plain form if it is one of Python's own; only the notebook's own are sent."""
    if type(formatter).__module__ not in ("logging", "__main__", "builtins"):
        return Stays(f"a {type(formatter).__name__} of logging")
    if type(formatter) is not logging.Formatter:
        return formatter
    styles: dict[Any, str] = {style: kind for kind, (style, _) in logging._STYLES.items()}
    return (formatter._fmt, formatter.datefmt, styles.get(type(formatter._style), "%"))


def _apply_logging(module: Any, key: str, value: Any) -> Undo:
    if key in ("disable", "captureWarnings"):
        before = logging.getLogger().manager.disable if key == "disable" else False
        getattr(logging, key)(value)
        return partial(getattr(logging, key), before)
    if key == "level names":
        names = _level_names()
        _name_levels(value)
        return partial(_name_levels, names)
    logger = logging.getLogger(None if key == "root" else key)
    level, propagate, disabled, handlers, filters = value
    added: list[logging.Handler] = []
    undo = partial(
        _restore_logger, logger, (logger.level, logger.propagate, logger.disabled), added
    )
    _set_filters(logger, filters)
    if logger.level != level:  # each change clears the caches of all loggers
        logger.setLevel(level)
    logger.propagate, logger.disabled = propagate, disabled
    present = {_stream_name(handler) for handler in logger.handlers}
    for stream, handler_level, formatter, own_filters in handlers:
        if stream not in present:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(handler_level)
            handler.filters[:] = own_filters
            handler.setFormatter(_made_formatter(formatter))
            logger.addHandler(handler)
            added.append(handler)
    return undo


def _made_formatter(form: Any) -> logging.Formatter | None:
    return logging.Formatter(*form) if isinstance(form, tuple) else form


_sent_filters: weakref.WeakKeyDictionary[logging.Logger, list[Any]] = weakref.WeakKeyDictionary()


def _set_filters(logger: logging.Logger, filters: list[Any]) -> None:
    """Add the notebook's filters, in place of those that it had before."""
    for one in _sent_filters.get(logger, ()):
        logger.removeFilter(one)
    for one in filters:
        logger.addFilter(one)
    _sent_filters[logger] = filters


def _restore_logger(
    logger: logging.Logger, state: tuple[Any, ...], added: Sequence[logging.Handler]
) -> None:
    level, logger.propagate, logger.disabled = state
    logger.handlers[:] = [handler for handler in logger.handlers if handler not in added]
    _set_filters(logger, [])
    logger.setLevel(level)


# ── warnings ─────────────────────────────────────────────────────────────────────────────────────

_PYTHONS_FILTERS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def _read_warnings(module: Any) -> Iterator[Setting | Stays]:
    # The last one that is added is the first that is asked.
    filters: list[Any] = list(warnings.filters)
    for action, message, category, where, line in reversed(filters):
        if action == "ignore" and category in _PYTHONS_FILTERS and not (message or where):
            continue
        if _pattern(where) == "__main__" or category.__module__.startswith("IPython."):
            continue  # IPython's own
        is_main = category.__module__ == "__main__"
        kind = category if is_main else (category.__module__, category.__qualname__)
        home = "warnings" if is_main or category.__module__ == "builtins" else category.__module__
        if home in sys.modules:
            value = (action, _pattern(message), kind, _pattern(where), line)
            yield Setting("warnings", home, f"{action} {category.__name__}", value)


def _pattern(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def _apply_warnings(module: Any, key: str, value: Any) -> Undo:
    action, message, kind, where, line = value
    if isinstance(kind, tuple):
        kind = getattr(sys.modules[kind[0]], kind[1])
    before = warnings.filters[:]
    warnings.filterwarnings(action, message, kind, where, line)
    return partial(_remove_filters, [added for added in warnings.filters if added not in before])


def _remove_filters(added: Sequence[Any]) -> None:
    left = [each for each in warnings.filters if each not in added]
    warnings.filters[:] = left  # type: ignore[index]  # typed as a Sequence; it is a list
    warnings.simplefilter("default", _NoWarning)  # makes the module forget what it has cached
    del warnings.filters[0]  # type: ignore[attr-defined]


class _NoWarning(Warning):
    """Never raised."""


# ── attributes of modules ────────────────────────────────────────────────────────────────────────

_MISSING = object()


def _apply_attribute(module: Any, key: str, value: Any) -> Undo:
    """Set an attribute that the notebook has set; a list or dict that it has changed keeps its identity."""
    *path, name = key.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    is_stored = hasattr(owner, "__dict__") and not is_property(owner, name)
    before = vars(owner).get(name, _MISSING) if is_stored else getattr(owner, name)
    if type(before) is type(value) and isinstance(value, (list, dict, set, deque)):
        copy = before.copy()
        _fill(before, value)
        return partial(_fill, before, copy)
    setattr(owner, name, value)
    return (
        partial(delattr, owner, name)
        if before is _MISSING
        else partial(setattr, owner, name, before)
    )


def is_property(owner: Any, name: str) -> bool:
    """Whether the class of ``owner`` computes an attribute, as those of modules of ``torch.backends`` do."""
    return hasattr(type(find_on_type(type(owner), name)), "__set__")


def _fill(target: Any, content: Any) -> None:
    content = content.copy()
    target.clear()
    target.extend(content) if isinstance(target, (list, deque)) else target.update(content)


_PROVIDERS = {  # by the module of the library, which has settings if it is imported
    "sys": _Provider(*_table("sys", _SYS)),
    "multiprocessing": _Provider(*_table("multiprocessing", _MULTIPROCESSING)),
    "decimal": _Provider(*_table("decimal", _DECIMAL)),
    "locale": _Provider(_read_locale, _apply_locale),
    "warnings": _Provider(_read_warnings, _apply_warnings),
    "logging": _Provider(_read_logging, _apply_logging),
    "torch": _Provider(*_table("torch", _TORCH)),
    "numpy": _Provider(_read_numpy, _apply_numpy),
    "pandas": _Provider(_read_pandas, _apply_pandas),
    "sklearn": _Provider(_read_sklearn, _apply_sklearn),
    "matplotlib": _Provider(_read_matplotlib, _apply_matplotlib),
    "keras": _Provider(*_table("keras", _KERAS)),
    "jax": _Provider(*_table("jax", _JAX)),
    # The kernel finds these in the notebook's cells: see ``capture.settings``.
    "attribute": _Provider(lambda module: iter(()), _apply_attribute),
}


# ── random numbers ───────────────────────────────────────────────────────────────────────────────

_LARGEST_SEED = 1 << 32
"""NumPy's seeds are smaller."""


def seed(number: int) -> None:
    """Seed the generators of Python, NumPy and torch; of the libraries also if they are imported later."""
    random.seed(number)
    hooks.add("numpy.random", lambda module: module.seed(number % _LARGEST_SEED))
    hooks.add("torch", lambda module: module.manual_seed(number))
