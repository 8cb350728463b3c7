"""``%%infer`` as a person types it: its line, what comes back, and what is refused before a rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic import capture
from hydrogen_magic.capture import CellText
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.errors import CaptureError, InferError, RankFailedError
from hydrogen_magic.inference import request
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.notebook.arguments.infer import InferArguments, parse_infer
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from tests import shells
from tests.gangs import until

pytestmark = pytest.mark.usefixtures("warm_agents")

TWICE = """
def predict(batch):
    return {"twice": batch["x"] * 2}
"""


def parsed(line: str) -> InferArguments:
    return parse_infer(line, defaults=JobSpec(rendezvous="horovod", out=("model",)))


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """A shell whose notebook has a frame ``df`` of 1,000 rows."""
    with shells.loaded_shell() as shell:
        shell.push({"df": pd.DataFrame({"x": range(1000), "y": 0.5})})
        yield shell


def run(shell: InteractiveShell, line: str, body: str = TWICE) -> object:
    return shell.run_cell_magic("infer", line, body)


def test_a_cell_that_is_run_again_finds_its_rank(shell: InteractiveShell) -> None:
    """Though its number, which tracebacks show, is another."""
    cell = """%%infer df --np 1 --quiet --out predicted
import os
def predict(batch):
    return [os.getpid()] * len(batch)
"""
    pids: list[int] = []
    for _ in range(2):
        shell.run_cell(cell, store_history=True).raise_error()
        pids += set(shell.user_ns["predicted"]["prediction"])
    assert pids[0] == pids[1]


# ── the line ─────────────────────────────────────────────────────────────────────────────────────


def test_a_seed_repeats_the_random_numbers(shell: InteractiveShell) -> None:
    """Ranks that stay would go on with the next ones."""
    body = (
        "import random\ndef predict(batch):\n    return {'r': [random.random() for _ in batch.x]}"
    )
    first, again = (run(shell, "df --np 1 --quiet --seed 7 --only", body) for _ in range(2))
    assert isinstance(first, pd.DataFrame) and first.equals(again)


def test_every_option_reaches_its_place() -> None:
    line = (
        "df -n 3 --cpu --out scored --batch-size 10 --columns 'a b,c' --schema 'p double' "
        "--on-error collect --retries 1 --timeout 5m --quiet --replace b,c"
    )
    assert parsed(line) == InferArguments(
        "df",
        JobSpec(np=3, gpu=False, retries=1, timeout_s=300.0, quiet=True),
        InferOptions(10, ("a b", "c"), False, "p double", "collect", ("b", "c")),
        "scored",
    )


@pytest.mark.parametrize(
    ("out", "name", "target"),
    [
        ("scored", "scored", None),
        ("./scored", None, "./scored"),
        ("scored.parquet", None, "scored.parquet"),
        ("/data/a,b", None, "/data/a,b"),
    ],
)
def test_out_is_a_name_or_a_path(out: str, name: str | None, target: str | None) -> None:
    arguments = parsed(f"rows.parquet --out '{out}'")
    assert (arguments.out, arguments.target) == (name, target)


@pytest.mark.parametrize(
    ("line", "frame"),
    [
        ("df[df.x > 0] --np 2", "df[df.x > 0]"),
        ("df[df['a b'] == ' -n'].head( 3 ) --out scored", "df[df['a b'] == ' -n'].head( 3 )"),
        ("load(x=-1)", "load(x=-1)"),
        ("df.dropna() -n 2", "df.dropna()"),
        ("--np 2 'a b.parquet'", "a b.parquet"),
        ("rows[1].parquet --only", "rows[1].parquet"),
    ],
)
def test_a_frame_is_a_name_an_expression_or_a_path(line: str, frame: str) -> None:
    assert parsed(line).frame == frame


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("df --out 1st", "a name for the result, like scored, or a path for data in files"),
        ("", "needs the name of a DataFrame"),
        ("df more", "takes one DataFrame, got df more"),
        ("df --out a,b", "should be one name"),
        ("df --batch-size 0", "1 or more rows"),
        ("df --on-error ignore", "choose fail, null or collect"),
        ("df --on inline", "predict(df.head())"),
        ("df --with horovod", "%%infer has no --with"),
        ("df --outlive", "%%infer has no --outlive: it is an option of %%distributed"),
        ("df --columns a, b --only", "write a list without spaces: a,b"),
    ],
)
def test_a_wrong_line_says_what_would_be_right(line: str, said: str) -> None:
    with pytest.raises(ArgumentsError) as refused:
        parsed(line)
    assert said in str(refused.value)


@pytest.mark.parametrize("option", ["--session lab", "--wait 5m", "--spread", "--on local"])
def test_options_without_a_use_for_spark_dataframes_are_refused(option: str) -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe"})()
    with pytest.raises(InferError, match=f"df is a Spark DataFrame, .*drop .*{option.split()[0]}"):
        request.plan(frame, parsed(f"df {option}"))


# ── a notebook ───────────────────────────────────────────────────────────────────────────────────


def test_the_result_is_the_frame_with_its_predictions(shell: InteractiveShell) -> None:
    assert run(shell, "df --np 2 --batch-size 64 --out scored --quiet") is None
    scored, given = shell.user_ns["scored"], shell.user_ns["df"]
    pd.testing.assert_frame_equal(scored, given.assign(twice=given["x"] * 2))
    only = run(shell, "df[df.x > 990] --np 1 --only --quiet")
    pd.testing.assert_frame_equal(only, scored[["twice"]].iloc[991:])
    changes = "def predict(batch):\n    batch['y'] += 1\n    batch['z'] = 2.5\n    return batch"
    changed = run(shell, "df --np 1 --quiet --replace y", changes)
    pd.testing.assert_frame_equal(changed, given.assign(y=1.5, z=2.5))


def test_a_path_is_parquet_data(shell: InteractiveShell, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": range(100)}), path)
    written = run(shell, f"{path} --np 2 --columns x --quiet")
    assert pq.read_table(str(written)).to_pydict() == {
        "x": list(range(100)),
        "twice": list(range(0, 200, 2)),
    }


def test_parquet_data_is_written_where_it_is_said(shell: InteractiveShell, tmp_path: Path) -> None:
    path, target = tmp_path / "rows.parquet", tmp_path / "scored.parquet"
    pq.write_table(pa.table({"x": range(100)}), path)
    assert run(shell, f"{path} --np 1 --only --quiet --out {target}") == str(target)
    assert pq.read_table(target).to_pydict() == {"twice": list(range(0, 200, 2))}
    assert run(shell, f"{path} --np 1 --only --quiet --out scored") is None
    assert shell.user_ns["scored"] == str(tmp_path / "rows-inferred.parquet")
    with pytest.raises(InferError, match="already exists and is not overwritten"):
        run(shell, f"{path} --np 1 --quiet --out {target}")
    with pytest.raises(InferError, match="a path needs a path of data as input"):
        run(shell, f"df --out {tmp_path / 'new.parquet'}")


def test_a_frame_may_have_classes_of_the_notebook(shell: InteractiveShell) -> None:
    """Its own class, and that of a value in ``attrs``."""
    shell.run_cell("""
import pandas as pd
class Table(pd.DataFrame):
    pass
class Unit:
    name = "m"
df = Table({"x": [1, 2]})
df.attrs["unit"] = Unit()
""").raise_error()
    body = "def predict(batch):\n    return {'unit': [batch.attrs['unit'].name] * len(batch)}"
    scored = run(shell, "df --np 1 --only --quiet", body)
    assert scored["unit"].tolist() == ["m", "m"]
    assert type(scored.attrs["unit"]) is shell.user_ns["Unit"]


def test_what_cannot_run_is_refused_with_a_remedy(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="needs the name of a DataFrame"):
        run(shell, "")
    with pytest.raises(InferError, match="no variable of this name; similar names: df"):
        run(shell, "dff")
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InferError, match=r"for the file or folder parts, write \./parts"):
        run(shell, "parts")
    with pytest.raises(InferError, match=r"df\[df\.z > 0\] raised AttributeError"):
        run(shell, "df[df.z > 0]")
    with pytest.raises(CaptureError, match="no_such_model"):
        run(shell, "df", "def predict(batch):\n    return no_such_model(batch)\n")


def test_a_cell_without_predict_is_refused_before_a_rank_starts(shell: InteractiveShell) -> None:
    known = known_gangs.gangs()  # held: those of earlier tests are collected at any time
    for body in ("x = 1", "class Model:\n    def predict(self, batch): ...", "m = df.predict"):
        with pytest.raises(InferError, match="defines no predict"):
            run(shell, "df --quiet", body)
    assert known_gangs.gangs() == known
    for body in ("predict = len", "exec('def predict(b): return b')", "from os.path import *"):
        request._check_predict(capture.capture_cell(CellText(body, "<c>", "c", 2, str), {}))


def test_a_failing_predict_shows_the_cell_and_not_the_inside_of_pandas(
    shell: InteractiveShell,
) -> None:
    with pytest.raises(RankFailedError) as failed:
        run(shell, "df --np 1 --quiet", "def predict(batch):\n    return batch['zz'] * 2")
    frames = [line for line in failed.value.report.splitlines() if ", in " in line]
    assert frames and all("line 3, in predict" in line for line in frames), failed.value.report


def test_a_run_is_stopped_and_continued(shell: InteractiveShell, tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = (
        "import time\n"
        "def predict(batch):\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        file.write('x')\n"
        "    time.sleep(0.02)\n"
        "    return {'twice': batch['x'] * 2}\n"
    )
    run_of = run(shell, "df --np 2 --batch-size 10 --detach --quiet", body)
    until(run_of.gang, lambda: (rows := run_of.gang.snapshot().rows) is not None and rows.done > 0)
    run_of.gang.stop()
    part = run_of.result
    assert 0 < len(part) < 1000 and list(part["twice"]) == [2 * x for x in part["x"]]
    with pytest.raises(InferError, match="but the cell changed since"):
        run(shell, "df --np 2 --batch-size 10 --resume --quiet", body.replace("* 2", "* 3"))
    before = len(log.read_text())
    same = body.replace("def predict", "\n# the model\ndef  predict")
    whole = run(shell, "df --np 1 --batch-size 10 --resume --only --quiet", same)
    assert list(whole["twice"]) == list(range(0, 2000, 2))
    assert len(log.read_text()) - before == (1000 - len(part)) / 10
