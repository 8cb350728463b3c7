"""The calls ``hm.launch`` and ``hm.run``."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from hydrogen_magic import capture
from hydrogen_magic.core.job import DEFAULT_MAX_CLOSURE_BYTES, JobSpec, variables
from hydrogen_magic.core.lazy_annotations import signature_of
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.attending import attend
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.interrupts import interrupts_held
from hydrogen_magic.errors import OptionTypeError, OptionValueError


def launch(
    function: Callable[..., Any],
    *args: Any,
    np: int | None = None,
    on: str | None = None,
    rendezvous: str | None = None,
    gpu: bool | None = None,
    pack: bool | None = None,
    env: Mapping[str, str] | None = None,
    retries: int = 0,
    timeout: float | None = None,
    wait: float | None = None,
    start_timeout: float = JobSpec.start_timeout_s,
    grace: float = JobSpec.grace_s,
    ports: str | None = None,
    max_closure: int = DEFAULT_MAX_CLOSURE_BYTES,
    run_name: str = "",
    track: str | None = None,
    session: str | None = None,
    ranks: Sequence[int] = (),
    push: Sequence[str] = (),
    idle: float | None = None,
    **kwargs: Any,
) -> Gang:
    """Call ``function(*args, **kwargs)`` on every rank of a new gang; return its Gang object at once.

    A parameter of the function with the name of an option, such as ``env``, can be passed by position only.

    Args:
        function: may be defined in the notebook, a local module or a package; sent with all it uses.
        np: number of ranks; ``-N`` means N ranks on this machine. None: 2, or those of the session.
        on: name of a placement: ``"local"``, ``"spark"``, ``"inline"`` (``np=1``, in this process; returns
            after the call has ended), or one of a plug-in. None: ``"local"``, or that of the session.
        rendezvous: how ranks find each other: ``"torch"``, or what a plug-in provides. None: ``"torch"``, or
            that of the session.
        gpu: True: a GPU for every rank; False: none; None: GPUs if every rank can have one.
        pack: hosts of a cluster. True: as few as possible; False: as many as possible; None: as few as
            possible for ranks with GPUs of their own, otherwise the cluster's choice.
        env: environment variables of every rank.
        retries: how often to start all ranks again after a failure.
        timeout: seconds after which the gang is stopped; None: never.
        wait: seconds to wait for hosts and slots of a cluster. None: refuse a gang that is larger than the
            cluster, and wait without limit for slots that other jobs hold.
        start_timeout: seconds a rank may take until the function is called.
        grace: seconds a rank that reacts to a stop may clean up.
        ports: range of ports to listen on for other machines, such as ``"40000-40100"``; None: any.
        max_closure: size limit of captured data, in bytes.
        run_name: name of the run in lists; by default the function's.
        track: name of a tracker that gets parameters and metrics: ``"mlflow"``, ``"wandb"``, or one of a
            plug-in; None: none.
        session: name of a session: ranks that stay, with their variables, for later calls and cells.
            None: the ranks end with the call.
        ranks: ranks of the session that take part; without a session those on which ``breakpoint()`` opens
            the debugger. Empty: all.
        push: names whose value in the notebook replaces that of the session's ranks.
        idle: seconds without a call or cell after which the session ends. None: one hour.

    Raises:
        CaptureError: an object that the function uses cannot be sent.
        PlacementError: the ranks cannot run as requested.
        HydrogenError: the session runs another cell.
        TypeError, ValueError: an option is invalid, or the function does not take these arguments.
    """
    options = locals().copy()  # the parameters: there are no other variables yet
    for name in ("function", "args", "kwargs"):
        del options[name]
    _check_call(function, args, kwargs)
    fields = _fields_of(**options)
    spec = JobSpec(**fields)
    if session is not None:
        spec = sessions.fitted(spec, fields)
    planned = launcher.plan(spec)
    with sessions.explained(spec):
        captured = capture.capture_call(
            function,
            args,
            kwargs,
            max_closure_bytes=max_closure,
            ranks_have_gpu=planned.uses_gpu,
            session=sessions.capture_for(spec),
        )
    return launcher.launch_captured(
        captured, spec, title=getattr(function, "__qualname__", repr(function))
    )


def spec_of(**options: Any) -> JobSpec:
    """Return the job that :func:`launch` runs with these options, for a plan of it; without a session."""
    return JobSpec(**_fields_of(**options))


def _fields_of(np: Any = None, on: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the fields of a JobSpec. None stands for the default, but for those of :data:`_NEVER_NONE`."""
    if isinstance(np, Integral) and np < 0:
        if on not in (None, "local"):
            raise OptionValueError(
                f"np={np} means {counted(int(-np), 'rank')} on this machine, which contradicts on={on!r}: "
                f"pass np={-np}, or drop on"
            )
        np = -np
    given = {"np": np, "on": on, **options}
    return {
        _FIELDS.get(name, name): _CONVERSIONS[name](value) if name in _CONVERSIONS else value
        for name, value in given.items()
        if value is not None or name in _NEVER_NONE
    }


def _check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise OptionTypeError for a call that would fail on every rank before its first line."""
    if not callable(function):
        advice = "pass the function and its arguments, as in hm.run(train, model, np=2)"
        if isinstance(function, (str, os.PathLike)):
            advice = f"run a script by the magic: %distributed {function}"
        raise OptionTypeError(f"hm.run and hm.launch expect a function, got {function!r}; {advice}")
    try:  # a decorator may pass other arguments than it takes
        signature = signature_of(function, follow_wrapped=False)
    except Exception:  # C functions may have none, and annotations are any code
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        called = f"{getattr(function, '__qualname__', repr(function))}()"
        unknown = next((name for name in kwargs if name not in signature.parameters), None)
        if unknown is None:
            raise OptionTypeError(f"{called} does not take these arguments: {error}") from None
        known = [*inspect.signature(launch).parameters, "quiet", *signature.parameters]
        close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.65)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise OptionTypeError(
            f"{unknown!r} is neither an option of hm.run and hm.launch nor a parameter of {called}{hint}"
        ) from None


def _port_range(text: str) -> PortRange:
    if not isinstance(text, str):
        raise OptionTypeError(f"ports should be str, got {text!r}, a {type(text).__name__}")
    try:
        return PortRange.parse(text)
    except ValueError as error:
        raise OptionValueError(f"ports {error}") from None


_FIELDS = {
    "on": "placement",
    "timeout": "timeout_s",
    "wait": "wait_s",
    "start_timeout": "start_timeout_s",
    "grace": "grace_s",
    "max_closure": "max_closure_bytes",
    "run_name": "name",
    "ranks": "on_ranks",
    "idle": "idle_s",
}
"""Options of :func:`launch` whose fields of ``JobSpec`` have other names."""
_NEVER_NONE = ("start_timeout", "grace", "max_closure", "run_name", "ranks", "push")
"""Options for which None is refused: it might mean that there is no limit."""
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "env": variables,
    "ports": _port_range,
    "ranks": tuple,
    "push": tuple,
}


def run(function: Callable[..., Any], *args: Any, quiet: bool = False, **options: Any) -> Any:
    """Like :func:`launch`, but wait, show the gang meanwhile, and return rank 0's value.

    With ``quiet``, only output is shown. Raises the same errors as :func:`launch`, and RankFailedError,
    RendezvousError, ResultError, GangStoppedError and GangTimeoutError; with ``on="inline"`` the function's
    own exception.
    """
    with interrupts_held():
        gang = launch(function, *args, **options)
        attend(gang, quiet=quiet)
    return gang.result
