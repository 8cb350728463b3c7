"""What the notebooks of these tests have imported."""

from __future__ import annotations

import importlib

import pytest

from hydrogen_magic.frameworks.horovod import installation


@pytest.fixture(scope="package", autouse=True)
def imported() -> None:
    """Have Horovod and torch imported before gangs are launched, so that agents import them once.

    Each rank would do that otherwise; one with an optimizer would import ``torch._dynamo``, in two seconds
    of a processor. The gangs of ``test_contract`` are launched without.
    """
    if installation.fault() is None:
        importlib.import_module("horovod.torch")
