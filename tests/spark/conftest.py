"""What every test on Spark begins with."""

from __future__ import annotations

import pytest

from hydrogen_magic.driver.placements.spark import private_calls


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which of Spark's calls have failed in earlier tests: every plan and run reports them."""
    monkeypatch.setattr(private_calls, "_refused", {})
