"""Tests of ``python -m hydrogen_magic``, without gangs."""

from __future__ import annotations

import os
import sys

import pytest

from hydrogen_magic.__main__ import main


def test_the_reader_of_its_output_may_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["gang", "list"]) == 1
