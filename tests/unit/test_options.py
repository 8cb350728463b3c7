"""Options of ``hm.launch`` are checked before anything starts: this folder allows no process."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver.placements.spark import spark_session
from hydrogen_magic.driver.placements.spark.spark_session import Session
from tests import ranks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"np": 0}, "np should be at least 1, got 0"),
        ({"np": "2"}, "np should be int, got '2'"),
        ({"np": -2, "on": "spark"}, "2 ranks on this machine, which contradicts on='spark'"),
        ({"np": np.int64(-2), "on": "spark"}, "np=-2 means 2 ranks on this machine"),
        ({"retries": -1}, "retries should be at least 0"),
        ({"timeout": "5"}, "timeout should be int or float, got '5'"),
        ({"env": {"A": 1}}, r"env\['A'\] should be a str"),
        ({"env": ["A=1"]}, r"env should be a dict like \{'NAME': 'value'\}, got a list"),
        ({"retries": True}, "retries should be int, got True, a bool"),
        ({"env": {"RANK": "7"}}, "tells a rank its place"),
        ({"env": {"HOROVOD_RANK": "0"}}, "tells a rank its place"),
    ],
)
def test_options_are_checked_before_anything_starts(options: dict[str, object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        hm.launch(ranks.gather, **options)  # type: ignore[arg-type]
    (shown,) = caught.value._render_traceback_()  # one line in a notebook
    assert shown in (f"TypeError: {caught.value}", f"ValueError: {caught.value}")


def _train(width: int, *, lr: float = 0.1) -> None: ...


@functools.wraps(_train)
def _wrapped(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "said"),
    [
        (_train, (1,), {"retires": 3}, r"neither .* of _train\(\); did you mean retries\?$"),
        (_train, (1,), {"seesion": "x"}, "did you mean session"),
        (_train, (1,), {"name": "wide"}, "did you mean run_name"),
        (_train, (1,), {"widht": 2}, "did you mean width"),
        (_train, (1,), {"seed": 1}, r"'seed' is neither an option .* a parameter of _train\(\)$"),
        (_train, (), {}, r"_train\(\) does not take these arguments: missing .* 'width'"),
        (_train, (1, 2), {}, "too many positional arguments"),
        (_train, (1,), {"np": 0}, "np should be"),
        (_wrapped, (), {"seed": 1, "np": 0}, "np should be"),
        (dict, (), {"seed": 1, "np": 0}, "np should be"),
        (None, (), {}, r"expect a function, got None; .* hm.run\(train, model, np=2\)"),
        ("train.py", (), {}, "%distributed train.py"),
    ],
)
def test_a_call_that_cannot_succeed_is_refused_before_anything_starts(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    for call in (hm.run, hm.launch):
        with pytest.raises((TypeError, ValueError), match=said):
            call(function, *args, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, "score double"), "hm.udf expects a function as predict, got 3"),
        ((lambda: 0, "score double"), "batch"),
        ((len, 3), 'a schema such as "score double", got 3'),
        ((len, "double"), "^schema 'double' has its end instead of a type"),
        ((len, "score money"), "schema 'score money' has 'money' instead of a type"),
        ((len, "score double", {"columns": "a"}), r'columns such as \["a", "b"\], got \'a\''),
        ((len, "score double", {"batch_size": 0}), "^batch_size should be 1 or more rows, got 0"),
    ],
)
def test_arguments_of_udf_are_checked_before_a_session_is_needed(
    arguments: tuple[Any, ...], said: str
) -> None:
    predict, schema, *options = arguments
    with pytest.raises((TypeError, ValueError), match=said):
        hm.udf(predict, schema, **(options[0] if options else {}))


def test_a_udf_names_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    spark = SimpleNamespace(version="4.0.1")
    old = Session(spark, False, "with Spark 4.0.1", "spark://there:7077")
    monkeypatch.setattr(spark_session, "find", lambda: old)
    with pytest.raises(hm.errors.PlacementError, match=r"found Spark 4\.0\.1 and pyspark \d"):
        hm.udf(len, "n long")


def test_a_udf_needs_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        spark_session, "_active", lambda: None
    )  # other tests of this process have some
    with pytest.raises(hm.errors.PlacementError, match=r"^hm\.udf needs a Spark session"):
        hm.udf(len, "n long")
