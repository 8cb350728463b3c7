"""The contract suite in this repository: which tests of a class run only in ``make test-all``, or never."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest

from hydrogen_magic.testing.contract import GangContract
from hydrogen_magic.testing.ranks import Library
from tests import jax_ranks, ranks, tensorflow_ranks

Contract = TypeVar("Contract", bound=type[GangContract])

LIBRARY = Library(ranks.meet, ranks.numbers, ranks.all_reduce, ranks.leave)
"""torch, or Horovod in its gangs. A local module's imports are seen: ranks are forked with torch imported."""
JAX = Library(jax_ranks.join, jax_ranks.numbers, jax_ranks.all_reduce)
TENSORFLOW = Library(tensorflow_ranks.join, tensorflow_ranks.numbers, tensorflow_ranks.all_reduce)
PLANS = (
    "test_a_plan_has_every_rank_and_no_effect",
    "test_an_impossible_number_of_ranks_is_refused",
)
SILENT_END = "test_the_rank_that_ends_silently_is_named"
KILLED, SEGFAULT, EXITS_0, EXITS = (
    f"{SILENT_END}[{how}]" for how in ("SIGKILL", "SIGSEGV", "_exit(0)", "exit(3)")
)
RAISES = "test_the_rank_that_raises_is_named_with_the_line"
FIRST_RAISES, LAST_RAISES = f"{RAISES}[0]", f"{RAISES}[-1]"
STOPS = "test_a_stop_interrupts_a_wait_for_other_ranks"
STOPS_JOIN, STOPS_WAIT = f"{STOPS}[rendezvous]", f"{STOPS}[collective]"
SESSION = "test_a_session_keeps_its_ranks_until_it_ends"
STANDS_STILL = "test_the_rank_that_stands_still_is_named"
DOES_NOT_JOIN = "test_ranks_that_do_not_join_are_named"
HAS_VALUES = "test_every_rank_has_its_value"
STARTS_AGAIN = "test_all_ranks_are_started_again_after_a_failure"
FINISHES_EARLY = "test_the_rank_that_finishes_before_a_collective_of_the_others_is_named"


def rarely(*names: str) -> Callable[[Contract], Contract]:
    """Mark inherited tests of a class as exhaustive: another class has them in ``make test``.

    ``NAME[VALUE]``: only the cases of a test that have this value.
    """

    def mark(contract: Contract) -> Contract:
        for name in names:
            test, value = _parts(name)
            found = _copied(getattr(contract, test))
            marked = partial(_marked, value=value)
            rare = _with_cases(found, marked) if value else pytest.mark.exhaustive(found)
            setattr(contract, test, rare)
        return contract

    return mark


def mainly(*names: str) -> Callable[[Contract], Contract]:
    """Mark all inherited tests of a class as exhaustive, but these."""

    def mark(contract: Contract) -> Contract:
        return rarely(*sorted(_tests(contract).difference(names)))(contract)

    return mark


def without(*names: str) -> Callable[[Contract], Contract]:
    """Leave out inherited tests of a class: other classes show the same of its placement and of its
    rendezvous, and nothing in these tests depends on both. Stands above :func:`rarely` and :func:`mainly`.

    ``NAME[VALUE]``: only the cases of a test that have this value.
    """

    def leave_out(contract: Contract) -> Contract:
        for name in names:
            test, value = _parts(name)
            left = partial(_left, value=value)
            found = _with_cases(_copied(getattr(contract, test)), left) if value else None
            setattr(contract, test, found)  # None hides the inherited one from pytest
        return contract

    return leave_out


def only(*names: str) -> Callable[[Contract], Contract]:
    """Leave out all inherited tests of a class, but these."""

    def leave_out(contract: Contract) -> Contract:
        return without(*sorted(_tests(contract).difference(names)))(contract)

    return leave_out


def _tests(contract: Contract) -> set[str]:
    return {name for name in dir(contract) if name.startswith("test_")}


def _parts(name: str) -> tuple[str, str]:
    """Return the name of a test, and the value of ``NAME[VALUE]``, empty for all cases."""
    test, _, value = name.removesuffix("]").partition("[")
    return test, value


def _copied(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same test: a mark on the inherited function would hold for all classes."""

    @functools.wraps(test)
    def copy(*arguments: Any, **fixtures: Any) -> None:
        test(*arguments, **fixtures)

    return copy


def _with_cases(
    test: Callable[..., Any], changed: Callable[[Any], Iterable[Any]]
) -> Callable[..., Any]:
    """Have a test run with what ``changed`` returns for each of its cases."""
    (cases,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    names, known = cases.args
    left = [found for case in known for found in changed(case)]
    assert left != [*known], f"{test.__name__} has no such case"
    others = [mark for mark in test.pytestmark if mark is not cases]  # type: ignore[attr-defined]
    test.pytestmark = [*others, pytest.mark.parametrize(names, left).mark]  # type: ignore[attr-defined]
    return test


def _marked(case: Any, value: str) -> list[Any]:
    """Return a case, as exhaustive if it has this value."""
    if isinstance(case, type(pytest.param())) or not _has(case, value):
        return [case]
    return [pytest.param(*_values(case), marks=pytest.mark.exhaustive)]


def _left(case: Any, value: str) -> list[Any]:
    """Return a case unless it has this value."""
    return [] if _has(case, value) else [case]


def _has(case: Any, value: str) -> bool:
    return value in map(str, _values(case))


def _values(case: Any) -> Sequence[Any]:
    return getattr(case, "values", case) if isinstance(case, tuple) else (case,)
