"""Options of ``hm.launch`` are checked before anything starts: this folder allows no process."""

from __future__ import annotations

import pytest

import hydrogen_magic as hm
from tests import ranks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 0}, "np should be at least 1, got 0"),
        ({"np": "2"}, "np should be int, got '2'"),
        ({"retries": -1}, "retries should be at least 0"),
        ({"timeout": "5"}, "timeout should be int or float, got '5'"),
        ({"env": {"A": 1}}, r"env\['A'\] should be a str"),
        ({"env": {"RANK": "7"}}, "tells a rank its place"),
        ({"env": {"HOROVOD_RANK": "0"}}, "tells a rank its place"),
    ],
)
def test_options_are_checked_before_anything_starts(options: dict[str, object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        hm.launch(ranks.gather, **options)  # type: ignore[arg-type]
    (shown,) = caught.value._render_traceback_()  # one line in a notebook
    assert shown in (f"TypeError: {caught.value}", f"ValueError: {caught.value}")
