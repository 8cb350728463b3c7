"""Results of a rank as a stream of parts: what fails stays alone, what is shared stays shared."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrogen_magic.core import dropped_objects, run_log
from hydrogen_magic.core.messages import ResultPart
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.known_gangs import load_results
from hydrogen_magic.driver.state import stored_results
from hydrogen_magic.driver.state.gang_results import GangResults, RankResults, saved_path
from hydrogen_magic.driver.state.stored_results import SavedResults, StoredResults
from hydrogen_magic.errors import HydrogenError, ResultError
from hydrogen_magic.node.worker.namespace import LoadedClosure
from hydrogen_magic.node.worker.results.results import deliver
from hydrogen_magic.notebook import outliving
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.serialization import payload, result_stream
from hydrogen_magic.serialization.closure import ClosureManifest
from hydrogen_magic.serialization.importable import resolve
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.serialization.result_stream import CELL_VALUE, UnopenedPart
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


class Unopenable:
    """Can be pickled; making it again fails."""

    def __reduce__(self) -> Any:
        return int, ("seven",)


class WithState:
    """Can be made again, but not given its state."""

    def __init__(self) -> None:
        self.field = 1

    def __setstate__(self, state: Any) -> None:
        raise KeyError("field of a newer version")


class Node:
    """It cannot be hashed before it has its state, which holds a set of it."""

    def __init__(self) -> None:
        self.name = "a"
        self.near = frozenset([self])

    def __hash__(self) -> int:
        return hash(self.name)


class Proxy:
    """It has no class before it has its state."""

    def __init__(self) -> None:
        self.kind = type(self)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return vars(self)["kind"]

    def __setstate__(self, state: Any) -> None:
        raise KeyError("field of a newer version")


class UnboundProxy(Proxy):
    """What it stands for is only in the process that has made it, and so is its class."""

    def __setstate__(self, state: Any) -> None: ...


class NeedsTensorFlow(WithState):
    def __setstate__(self, state: Any) -> None:
        raise ModuleNotFoundError("No module named 'tensorflow'")


def packed(objects: dict[str, Any]) -> dict[str, Payload]:
    """Return the sections of those objects that can be pickled."""
    packer = result_stream.Packer(Pickler)
    sections = {}
    for name, obj in objects.items():
        with contextlib.suppress(TypeError):
            sections[name] = packer.pack(name, obj)
    return sections


def opened(objects: dict[str, Any]) -> dict[str, Any]:
    sections = packed(objects)
    found = result_stream.unpack(list(sections.values()))
    return dict(zip(sections, found, strict=True))


def received(*parts: ResultPart, objects: dict[str, Any]) -> RankResults:
    sections = packed(objects)
    return RankResults(0, [(part, sections.get(part.name, Payload(b""))) for part in parts])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)
bad = st.sampled_from([Unpicklable, Unopenable, WithState]).map(lambda kind: kind())


@given(st.lists(st.tuples(plain, st.none() | bad), min_size=1, max_size=6), plain)
def test_parts_that_fail_do_not_affect_the_others(
    values: list[tuple[Any, Any]], shared: Any
) -> None:
    objects = {
        f"name{n}": {"shared": [shared], "value": value, "bad": problem} if problem else [value]
        for n, (value, problem) in enumerate(values)
    }
    found = opened(objects)
    for (name, obj), (_, problem) in zip(objects.items(), values, strict=True):
        if isinstance(problem, Unpicklable):
            assert name not in found
        elif problem is not None:
            rest = found[name].rest
            assert isinstance(found[name], UnopenedPart) and isinstance(rest["bad"], MissingObject)
            assert rest["value"] == obj["value"] and rest["shared"] == [shared]
        else:
            assert found[name] == obj


@pytest.mark.parametrize("kind", [Node, Proxy])
def test_an_object_that_cannot_be_asked_before_it_has_its_state_stays_alone(kind: Any) -> None:
    found = opened({"bad": [0, kind()], "good": [1]})
    assert isinstance(found["bad"], UnopenedPart) and found["bad"].rest[0] == 0
    assert found["good"] == [1]


def test_a_result_whose_class_the_notebook_defines_later_can_be_loaded_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new kernel may have attached to the gang before the cell with the class runs."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    class ByName:
        def __reduce__(self) -> Any:
            return resolve, ("__main__", "Later")

    one = ByName()
    results = received(*map(ResultPart, ("a", "b", "c")), objects={"a": [one], "b": one, "c": [1]})
    reason = "AttributeError: module '__main__' has no attribute 'Later'; run the cell that defines `Later`"
    with pytest.raises(ResultError, match=f"{reason}, and try again"):
        results.result("a")
    known = results.result("c")
    main.Later = object()  # type: ignore[attr-defined]
    assert results.result("a")[0] is results.result("b") and results.result("c") is known
    assert not results.errors and results.arrived() == ["a", "b", "c"]


def test_a_class_that_the_kernel_lacks_costs_no_other_class_of_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream has the name of the module once."""
    module = types.ModuleType("has_two_classes")
    exec("class New: pass\nclass Known: pass", vars(module))
    monkeypatch.setitem(sys.modules, "has_two_classes", module)
    sections = packed({"fresh": [module.New(), module.Known()], "known": module.Known()})
    del module.New
    fresh, known = result_stream.unpack([*sections.values()])
    assert isinstance(fresh, UnopenedPart) and isinstance(fresh.rest[0], MissingObject)
    assert type(fresh.rest[1]) is type(known) is module.Known


def test_parts_share_what_they_shared() -> None:
    weights = np.arange(100_000)
    found = opened({"model": {"w": weights}, "bad": [weights, Unpicklable()], "opt": [weights]})
    assert found.keys() == {"model", "opt"}
    assert found["model"]["w"] is found["opt"][0]
    np.testing.assert_array_equal(found["opt"][0], weights)


def test_a_part_that_is_taken_back_leaves_no_trace_in_the_others() -> None:
    """Objects that were pickled before the failure travel again with a later part."""

    def counter() -> Any:
        count = [0]

        def add() -> int:
            count[0] += 1
            return count[0]

        return add, lambda: count

    first, weights, (add, show) = [1], np.arange(5000), counter()
    found = opened(
        {"a": first, "bad": [weights, add, first, Unpicklable()], "b": [weights, add, first, show]}
    )
    assert found["b"][2] is found["a"] and found["b"][1]() == 1 and found["b"][3]() == [1]
    np.testing.assert_array_equal(found["b"][0], weights)


def test_a_part_that_refers_to_a_lost_object_is_not_opened() -> None:
    """Its copy of the object would lack what could not be made. Others that it shares are opened."""
    common, whole = [Unopenable(), 1], [UnboundProxy()]
    found = opened({"first": [common, whole], "second": {"common": common}, "third": [whole]})
    assert isinstance(found["second"], UnopenedPart) and "shares objects" in found["second"].reason
    assert type(found["third"][0][0]) is UnboundProxy


def test_looking_up_the_same_name_is_not_sharing() -> None:
    objects = {"bad": [np.float32, math.sqrt, Unopenable()], "good": [np.float32, math.sqrt]}
    assert opened(objects)["good"] == [np.float32, math.sqrt]


def test_results_of_a_rank_name_what_is_missing() -> None:
    results = received(
        ResultPart("a"), ResultPart("b", error="`b` cannot be sent"), ResultPart("c"), ResultPart(CELL_VALUE),
        objects={"a": [1], "c": Unopenable(), CELL_VALUE: 7},
    )  # fmt: skip
    assert dict(results.variables()) == {"a": [1]} and results.value() == 7
    for name, message in {
        "b": "cannot be sent",
        "c": "cannot be loaded",
        "d": "not arrive",
    }.items():
        with pytest.raises(ResultError, match=message):
            _ = results.result(name)
    assert results.variables().get("typo") is None and "b" not in results.variables()
    assert results.is_worth_saving(has_succeeded=True)
    reason = "ValueError: invalid literal for int() with base 10: 'seven'"
    assert results.everything()["c"] == MissingObject("int", reason)


def test_a_result_whose_transfer_fails_costs_no_other_one() -> None:
    def send(part: ResultPart, section: Payload, on_write: Any) -> None:
        if part.name == "a" and not part.error:
            raise RuntimeError("can't start new thread")
        sent[part.name] = part.error

    module = types.ModuleType("of_the_rank")
    module.__dict__["a"], module.__dict__["b"] = [1], [2]
    loaded = LoadedClosure(ClosureManifest("cell", out=("a", "b")), module, own_process=False)
    sent: dict[str, str] = {}
    deliver(loaded, 3, True, send)
    assert sent == {"a": "`a` cannot be sent: can't start new thread", "b": "", CELL_VALUE: ""}


def test_the_backend_of_keras_is_named_where_its_default_cannot_be_imported() -> None:
    results = received(ResultPart(CELL_VALUE), objects={CELL_VALUE: NeedsTensorFlow()})
    remedy = r"'tensorflow'; if Keras imports tensorflow, set os.environ\["
    with pytest.raises(ResultError, match=remedy):
        results.value()


def test_a_variable_named_like_the_value_does_not_replace_it() -> None:
    results = received(ResultPart("_"), ResultPart(CELL_VALUE), objects={"_": 1, CELL_VALUE: 2})
    assert results.everything() == {"_": 1, CELL_VALUE: 2} and results.key_of_value == ""
    assert received(ResultPart(CELL_VALUE), objects={CELL_VALUE: 2}).key_of_value == "_"


def test_a_small_array_of_a_large_result_does_not_keep_all_of_it() -> None:
    objects = {"scores": {"all": np.zeros(1 << 20), "metric": np.arange(1000)}}
    fd = payload.to_memfd(packed(objects)["scores"])
    section = payload.from_memfd(fd)
    os.close(fd)
    results, mapped = RankResults(0, []), weakref.ref(section.buffers[0].obj)
    results.add(ResultPart("scores"), section)
    scores = results.variables()["scores"]
    del results, section
    assert mapped() is not None
    metric = scores.pop("metric")
    del scores
    assert mapped() is None and metric[999] == 999


def test_results_survive_on_disk(tmp_path: Path) -> None:
    objects = {"a": np.arange(10_000), CELL_VALUE: {"x": [1, 2]}}
    results = received(
        ResultPart("a"), ResultPart("b", error="why"), ResultPart(CELL_VALUE), objects=objects
    )
    path = tmp_path / "results-0"
    result_stream.save(results.parts, path)
    again = RankResults(0, result_stream.load(path))
    np.testing.assert_array_equal(again.result("a"), objects["a"])
    assert again.value() == {"x": [1, 2]} and again.errors == {"b": "why"}
    assert [file.name for file in tmp_path.iterdir()] == ["results-0"]


def test_a_later_attempt_replaces_results_only_when_it_sends_some(tmp_path: Path) -> None:
    results = GangResults("3f2a", tmp_path)
    for attempt in range(2):
        results.add(0, attempt, ResultPart(CELL_VALUE), packed({CELL_VALUE: attempt})[CELL_VALUE])
        assert results.value(0) == attempt
    assert isinstance(results.value_or_error(1), ResultError)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ([(0, 0), (0, 1), (1, 0)], {0: (1, 0)}),
        ([(0, 0), (0, 1), (1, 1), (1, 0)], {0: (1, 0), 1: (1, 1)}),
        ([(0, 0), (0, 1), (1, 1), (2, 1)], {0: (0, 0), 1: (0, 1)}),
        ([(0, 1), (0, 2), (1, 2)], {2: (1, 2)}),
        ([(0, 1), (2, 0)], {0: (2, 0)}),
    ],
    ids=["first rank", "all", "others", "never the first", "only the first"],
)
def test_results_are_of_one_attempt(
    sent: list[tuple[int, int]], kept: dict[int, tuple[int, int]], tmp_path: Path
) -> None:
    """The first rank's results are what a cell is run for: its values for other ranks are of no use alone.

    ``sent``: attempt and rank of each result, in order; ``kept``: those to be loaded, by their rank.
    """
    results = GangResults("3f2a", tmp_path)
    for attempt, rank in sent:
        value = {CELL_VALUE: (attempt, rank)}
        results.add(rank, attempt, ResultPart(CELL_VALUE), packed(value)[CELL_VALUE])
    note = results.save(has_succeeded=False, n_attempts=4)
    (attempt,) = {attempt for attempt, _ in kept.values()}
    assert f"(the value) of attempt {attempt + 1} are saved" in note
    saved = SavedResults("3f2a", tmp_path)
    found = {rank: saved.value(rank) for rank in range(3) if saved.of(rank).parts}
    assert found == kept


def sent_by(first: int, results: GangResults) -> GangResults:
    """Have all ranks from ``first`` to rank 2 send their number."""
    for rank in range(first, 3):
        results.add(rank, 0, ResultPart(CELL_VALUE), packed({CELL_VALUE: rank})[CELL_VALUE])
    return results


@pytest.mark.parametrize(
    ("first", "note"),
    [
        (0, "ranks 0, 1 and 2 (the value){}('3f2a', RANK)"),
        (1, "ranks 1 and 2 (the value){}('3f2a', 1) and hydrogen_magic.load_results('3f2a', 2)"),
        (2, "rank 2 (the value){}('3f2a', 2)"),
    ],
)
def test_results_of_every_rank_are_saved_after_a_failure(
    first: int, note: str, tmp_path: Path
) -> None:
    results = sent_by(first, GangResults("3f2a", tmp_path, first))
    where = " are saved in the record of the gang; load them with hydrogen_magic.load_results"
    text = f"the results of {note.format(where)}"
    assert results.save(has_succeeded=False) == text == results.saved_note
    assert not results.are_worth_saving(False) and results.nbytes == 0, "nothing is held twice"
    saved = SavedResults("3f2a", tmp_path)
    assert [saved.value(rank) for rank in range(first, 3)] == [*range(first, 3)]


def test_a_note_tells_partial_results_from_those_that_are_complete(tmp_path: Path) -> None:
    """The value comes last, and is all that other ranks send."""
    results = GangResults("3f2a", tmp_path)
    results.add(0, 0, ResultPart("model"), packed({"model": [1]})["model"])
    results.add(1, 0, ResultPart(CELL_VALUE, error="a lock"), Payload(b""))
    results.add(2, 0, ResultPart(CELL_VALUE), packed({CELL_VALUE: 2})[CELL_VALUE])
    results.add(3, 0, ResultPart(CELL_VALUE), result_stream.NONE)
    assert results.save(has_succeeded=False) == (
        "partial results of rank 0 (`model`) and the results of rank 2 (the value) are saved in the record "
        "of the gang; load them with hydrogen_magic.load_results('3f2a') and "
        "hydrogen_magic.load_results('3f2a', 2)"
    )
    saved = SavedResults("3f2a", tmp_path)
    assert saved.of(0).variables()["model"] == [1] and saved.value(2) == 2
    assert saved.of(1).errors == {CELL_VALUE: "a lock"}


class NotHere:
    def __reduce__(self) -> Any:
        return not_here, ()


def not_here() -> None:
    raise ImportError("no module of this name")


@pytest.mark.parametrize(
    ("how", "until_used", "after"),
    [
        ("launched", ["results-0", "results-1", "results-2", "unseen"], []),
        ("looked at before", ["results-0", "results-1", "results-2", "unseen"], []),
        ("awaited", ["checkpoints"], []),
        ("on a full disk", ["checkpoints"], []),
        ("without a result", [], []),
        ("without the value", ["checkpoints", "results-0", "unseen"], ["checkpoints"]),
        (
            "with a part of one",
            ["checkpoints", "results-0", "unseen"],
            ["checkpoints", "results-0"],
        ),
        ("with a reason alone", ["checkpoints"], ["checkpoints"]),
        ("not loadable", ["results-0", "unseen"], ["results-0", "unseen"]),
        ("not loadable, awaited", ["checkpoints"], ["checkpoints"]),
        ("not loadable before", ["results-0", "unseen"], []),
    ],
)
def test_something_replaces_results_until_they_are_used(
    how: str,
    until_used: list[str],
    after: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel may end before: after ``--detach`` days later, or while it unpickles a large result."""
    results = GangResults("3f2a", tmp_path)
    if how.startswith("not loadable"):
        results.add(0, 0, ResultPart(CELL_VALUE), packed({CELL_VALUE: NotHere()})[CELL_VALUE])
    elif how == "without a result":
        results.add(0, 0, ResultPart(CELL_VALUE), result_stream.NONE)
    elif how.startswith("with"):
        if "reason" not in how:
            part = ResultPart("model", is_partial="part" in how)
            results.add(0, 0, part, packed({"model": [1]})["model"])
        results.add(0, 0, ResultPart(CELL_VALUE, "a lock"), Payload(b""))
    else:
        sent_by(0, results)
    results.are_awaited = how.endswith("awaited")
    if how.endswith("before"):  # by hm.load_results while it runs
        results.value_or_error(0)
        monkeypatch.setattr(sys.modules[__name__], "not_here", lambda: 1)
    if how == "on a full disk":
        monkeypatch.setattr(
            result_stream, "save", MagicMock(side_effect=OSError(28, "No space left"))
        )
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "state").write_bytes(b"the work of days")
    kept_in_memory = (
        "until they are used, the results are kept in this kernel's memory only (No space left)"
    )
    assert results.keep(checkpoints) == (kept_in_memory if how == "on a full disk" else "")
    assert sorted(path.name for path in tmp_path.iterdir()) == until_used
    results.value_or_error(0)
    assert sorted(path.name for path in tmp_path.iterdir()) == after


@pytest.mark.parametrize("ends", [False, True])
def test_copies_of_results_that_nothing_refers_to_are_deleted(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that uses no results does not fill the disk. At its end, a kernel drops everything."""
    monkeypatch.setattr(dropped_objects, "process_ends", threading.Event())
    results = sent_by(0, GangResults("3f2a", tmp_path))
    results.keep(tmp_path / "checkpoints")
    if ends:
        dropped_objects.process_ends.set()
    del results
    assert any(tmp_path.iterdir()) == ends


@pytest.mark.parametrize(
    ("kind", "rest"),
    [
        (GangResults, "kept in this kernel's memory only ({}); load them with {}"),
        (StoredResults, "lost ({})"),
    ],
)
def test_results_for_which_the_disk_has_no_space(
    kind: type[GangResults], rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's is tried: a smaller one may still fit."""
    results, save = sent_by(0, kind("3f2a", tmp_path)), result_stream.save

    def fails_for_rank_1(parts: Any, path: Path) -> None:
        if path.name == "results-1":
            raise OSError(28, "No space left on device", str(path))
        save(parts, path)

    monkeypatch.setattr(result_stream, "save", fails_for_rank_1)
    saved, lost = results.save(has_succeeded=False).split("gang; ")
    assert saved == "the results of ranks 0 and 2 (the value) are saved in the record of the "
    calls, _, not_saved = lost.partition("; ")
    assert calls.endswith("('3f2a') and hydrogen_magic.load_results('3f2a', 2)")
    load = "hydrogen_magic.load_results('3f2a', 1)"
    why = rest.format("No space left on device", load)
    assert not_saved == f"the results of rank 1 (the value) are {why}"
    assert SavedResults("3f2a", tmp_path).value(2) == 2 and results.value(1) == 1


def with_file(folder: Path) -> Any:
    """Return an ended gang whose results are in ``folder``."""
    ended = types.SimpleNamespace(is_terminal=True)
    return types.SimpleNamespace(
        id="3f2a",
        first_rank=1,
        received=SavedResults("3f2a", folder),
        snapshot=lambda: ended,
        raise_for_state=lambda: None,
    )


def test_variables_that_arrived_are_assigned_before_another_is_reported(tmp_path: Path) -> None:
    results = sent_by(1, GangResults("3f2a", tmp_path, 1))
    results.add(1, 0, ResultPart("arr"), packed({"arr": [1]})["arr"])
    results.add(1, 0, ResultPart("lock", error="`lock` cannot be pickled"), Payload(b""))
    results.save(has_succeeded=False)
    user_ns: dict[str, Any] = {"arr": 0}
    why = "rank 1: `lock` cannot be pickled\nassigned arr of gang 3f2a (replaced: arr)"
    with pytest.raises(ResultError, match=f"^{re.escape(why)}$"):
        outliving.assign(with_file(tmp_path), ["lock", "arr"], user_ns)
    assert user_ns == {"arr": [1]}
    with pytest.raises(ArgumentsError, match=r"--out q: gang 3f2a has arr, lock$"):
        outliving.assign(with_file(tmp_path), ["arr", "q"], {})


@pytest.mark.parametrize("n_bytes", [4, 20, 30, 100])
def test_a_damaged_file_of_results_is_reported(
    n_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "run_dir", lambda gang_id: tmp_path)
    sent_by(0, GangResults("3f2a", tmp_path)).save(has_succeeded=False)
    assert load_results("3f2a", 1) == {"_": 1}
    os.truncate(saved_path(tmp_path, 1), n_bytes)
    said = f"the file of its results is damaged: {re.escape(str(saved_path(tmp_path, 1)))} \\("
    with pytest.raises(HydrogenError, match=f"of rank 1 are saved for run '3f2a': {said}"):
        load_results("3f2a", 1)
    with pytest.raises(ResultError, match=f"rank 1: {said}"):
        outliving.assign(with_file(tmp_path), ["q"], {})


def test_a_damaged_pickle_and_those_after_it_are_reported() -> None:
    """Later ones refer to its objects by their number: they would get wrong ones."""
    shared, other = ["c"], ["d"]
    sections = packed({"a": [shared], "b": [shared, other], "c": [shared, other]})
    cut = Payload(sections["b"].pickled[:-8])
    whole, *damaged = result_stream.unpack([sections["a"], cut, sections["c"]])
    assert whole == [["c"]]
    for part in damaged:
        assert isinstance(part, UnopenedPart) and "its pickle is damaged" in part.reason


def test_results_of_a_gang_that_cannot_be_recorded_are_loaded(
    hydrogen_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hydrogen_home.touch()
    gang = Gang(GangRun("3f2a", run_log.Record.create("3f2a")))
    monkeypatch.setattr(known_gangs, "gangs", lambda: {"3f2a": gang})
    note = sent_by(0, gang.received).save(has_succeeded=False)
    assert (
        "are kept in a temporary folder as long as hm.gangs() lists" in note
        and "record" not in note
    )
    assert load_results("3f2a", 1) == {"_": 1}
    for name, why in (
        ("gone", "no gang has the ID or name 'gone'"),
        ("3f2a", "no results of rank 9"),
    ):
        with pytest.raises(HydrogenError, match=why):
            load_results(name, 9)
    known_gangs.forget(gang)


def test_no_cell_waits_for_results_any_more_when_the_user_has_interrupted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gang = Gang(GangRun("3f2a", run_log.Record.create("3f2a")))
    monkeypatch.setattr(gang, "wait", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _ = gang.result
    assert not gang.received.are_awaited
    known_gangs.forget(gang)


def test_a_full_disk_delays_what_an_owner_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = StoredResults("3f2a", tmp_path)
    for rank in range(2):
        for name, section in packed({CELL_VALUE: rank, "model": [rank]}).items():
            results.add(rank, 0, ResultPart(name), section)
    full = [OSError(28, "No space left on device")] * 2
    save = result_stream.save

    def fails_at_first(*arguments: Any) -> None:
        if full:
            raise full.pop()
        save(*arguments)

    said: list[str] = []
    results.on_problem = said.append
    monkeypatch.setattr(result_stream, "save", fails_at_first)
    monkeypatch.setattr(stored_results, "_AGAIN_S", 0.0)
    assert results.are_worth_saving(True) and results.save(True) == ""
    assert len(said) == 1 and "No space left on device" in said[0] and "trying again" in said[0]
    loaded = SavedResults("3f2a", tmp_path)
    assert [loaded.value(0), loaded.value(1), loaded.of(1).result("model")] == [0, 1, [1]]
    assert isinstance(loaded.value_or_error(2), ResultError)
    monkeypatch.setattr(stored_results, "_PATIENCE_S", 0.0)
    full.extend([OSError(28, "No space left on device")] * 3)
    assert results.save(True).endswith("they are lost")


def test_a_folder_that_was_deleted_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = StoredResults("3f2a", tmp_path / "deleted")
    results.add(0, 0, ResultPart(CELL_VALUE), packed({CELL_VALUE: 1})[CELL_VALUE])
    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(stored_results, "time", clock)
    assert results.save(True).endswith("they are lost")


def test_a_rank_announces_each_step_of_its_results_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)  # nothing to gather
    module = types.ModuleType("of_the_rank")
    module.__dict__["a"], module.__dict__["b"] = object(), 1
    loaded = LoadedClosure(ClosureManifest("cell", out=("a", "b")), module, own_process=False)
    steps: list[str] = []
    deliver(loaded, [object()], True, lambda part, section, on_write: None, begin=steps.append)
    assert steps == ["packing `a`", "packing the value"], "a number is packed at once"
