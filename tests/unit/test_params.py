"""Tests of the values by which lists tell runs apart."""

from __future__ import annotations

import shlex

import pytest

from hydrogen_magic.capture import params


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--lr 0.1 --batch-size=256 data/", {"lr": 0.1, "batch_size": 256}),
        ("--shift -1 --amp --name 'two words'", {"shift": -1, "amp": True, "name": "two words"}),
        ("model.width=64 --amp -- rest", {"model.width": 64, "amp": True}),
        ("--list 1 2 -3.5 --last 4 data/", {"list": "1 2 -3.5", "last": 4}),
        ("--api-key 123 --token=abc plain", {}),
        (f"--long {'x' * 101}", {}),
        ("", {}),
    ],
)
def test_options_of_a_script(line: str, found: dict[str, params.Param]) -> None:
    assert params.of_arguments(shlex.split(line)) == found
