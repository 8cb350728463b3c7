"""``%%distributed --sweep`` with real gangs."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.driver.history import history
from hydrogen_magic.driver.sweep import Sweep, last_sweep
from hydrogen_magic.errors import CaptureError, GangStoppedError, SweepError
from tests.documented import covers

pytestmark = pytest.mark.usefixtures("warm_agents")

LOGGED = textwrap.dedent(
    """
    %%distributed --np 1 --cpu {options} --sweep lr=0.1,0.2 --sweep width=64,128
    import os, hydrogen_magic as hm
    for step in range(3):
        hm.log(step, loss=scaled(step))
    model = (lr, width)
    threads = os.environ.get("OMP_NUM_THREADS")
    {{"score": lr * width, "threads": threads, "forkserver": os.getppid()}}
    """
).lstrip()
DEFINED = "lr, width = 1.0, 1\ndef scaled(step):\n    return lr * step"


def run(shell: InteractiveShell, cell: str) -> Sweep:
    done = shell.run_cell(cell, store_history=True)
    done.raise_error()
    assert isinstance(done.result, Sweep)
    return done.result


@covers("""`fmin(fn=train_fn, trials=SparkTrials(parallelism=2))` of Hyperopt""")
def test_each_combination_is_a_gang_with_its_values(
    notebook_shell: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in functions that the cell calls; the notebook keeps its own values."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    n_cores = len(os.sched_getaffinity(0))
    threads = str(n_cores // min(4, n_cores)) if n_cores > 1 else None
    notebook_shell.run_cell(DEFINED)
    capsys.readouterr()
    sweep = run(notebook_shell, LOGGED.format(options="--name grid --out model --timeout 100"))
    rows = sweep.results
    values = [(0.1, 64), (0.1, 128), (0.2, 64), (0.2, 128)]
    assert [tuple(row["params"].values()) for row in rows] == values
    assert [row["result"]["score"] for row in rows] == [lr * width for lr, width in values]
    assert [row["out"]["model"] for row in rows] == values
    assert [row["metrics"]["loss"] for row in rows] == [0.2, 0.2, 0.4, 0.4]
    assert {row["result"]["threads"] for row in rows} == {threads}, "gangs share the cores"
    # With more than two at once, one may end before the last of them begins.
    n_forkservers = len({row["result"]["forkserver"] for row in rows})
    assert min(2, n_cores) <= n_forkservers <= min(4, n_cores), "they are used again"
    assert sweep.best("score")["params"] == {"lr": 0.1, "width": 64}
    user_ns = notebook_shell.user_ns
    assert (user_ns["lr"], user_ns["width"]) == (1.0, 1) and "model" not in user_ns

    listed = history().set_index("gang").loc[[row["gang"] for row in rows]]
    assert list(listed["name"])[1] == "grid lr=0.1 width=128"
    assert list(listed["params.width"]) == [64, 128, 64, 128]
    printed = capsys.readouterr().out
    assert printed.count(": succeeded in") == 4 and "lr=0.2 width=64: succeeded" in printed
    header, *lines = printed.splitlines()[-6:-1]  # then the cell's value
    assert header.split() == ["run", "state", "took", "lr", "width", "loss"] and len(lines) == 4


def test_a_run_that_fails_costs_only_itself(notebook_shell: InteractiveShell) -> None:
    notebook_shell.run_cell("lr = 1")
    cell = "%%distributed --np 1 --quiet --retries 1 --sweep lr=0,1,2\nprint('x')\n1 / lr"
    with pytest.raises(SweepError, match="1 of 3 runs of the sweep failed: lr=0: rank 0") as raised:
        run(notebook_shell, cell)
    assert "1 / lr" in raised.value.report, "its line of the cell"
    sweep = last_sweep()
    assert sweep is not None
    assert [row["result"] for row in sweep.results] == [None, 1.0, 0.5]
    [failed] = [gang for gang in sweep.gangs if gang is not None and gang.state == "FAILED"]
    assert failed.snapshot().attempt == 1, "--retries holds for each run"


def test_each_combination_resumes_from_its_own_checkpoint(
    notebook_shell: InteractiveShell, tmp_path: Path
) -> None:
    notebook_shell.run_cell("lr = 0")
    options = f"--np 1 --cpu --quiet --env HYDROGEN_MAGIC_CHECKPOINTS={tmp_path}"
    cell = f"%%distributed {options} --sweep lr=1,2\nimport hydrogen_magic as hm\n"
    cell += "lrs = hm.checkpoint.load() or []\nhm.checkpoint.save([*lrs, lr])\nlrs"
    for expected in ([[], []], [[1], [2]]):
        sweep = run(notebook_shell, cell)
        assert [row["result"] for row in sweep.results] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr=1", "lr=2"]


def test_what_cannot_run_is_refused_before_anything_starts(
    notebook_shell: InteractiveShell,
) -> None:
    notebook_shell.run_cell("import threading\nwidth = lr = 1")
    before = last_sweep()
    with pytest.raises(UsageError, match=r"does not use `wdith`.*it uses lr, width.*mean width"):
        run(notebook_shell, "%%distributed --sweep wdith=1,2\nlr * width")
    with pytest.raises(UsageError, match=r"does not use `Lr`.*it uses lr, width.*mean lr"):
        run(notebook_shell, "%%distributed --sweep Lr=1,2\nlr * width")
    with pytest.raises(UsageError, match=r"does not use `lr` of the notebook$"):
        run(notebook_shell, "%%distributed --sweep lr=1,2\n3")
    with pytest.raises(UsageError, match=r"the cell assigns `lr` before it uses it"):
        run(notebook_shell, "%%distributed --sweep lr=1,2\nlr = 3\nlr * width")
    with pytest.raises(CaptureError, match=r"`lr` \(_thread.lock\) cannot be sent"):
        run(notebook_shell, "%%distributed --sweep lr=1,threading.Lock()\nlr")
    assert last_sweep() is before


def test_a_dry_run_lists_the_combinations(
    notebook_shell: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook_shell.run_cell("lr = 1")
    done = notebook_shell.run_cell("%%distributed --np 1 --dry-run --sweep lr=1,*range(2,4)\nlr")
    assert done.result is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["run  lr", "1    1", "2    2", "3    3"]
    assert lines[4].startswith("3 runs, ") and any(line.startswith("rank  host") for line in lines)
    notebook_shell.run_cell("lrs = [1, 2]")
    for values, note in (("lrs", "lr=*lrs sweeps over its items"), ("*lrs", ""), ("lrs,[3]", "")):
        notebook_shell.run_cell(f"%%distributed --np 1 --cpu --dry-run --sweep lr={values}\nlr")
        err = capsys.readouterr().err
        assert err.endswith(f"{note}\n") if note else "note" not in err
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for jobs, said in (("", "3 at once"), ("--sweep-jobs 2", "2 at once")):
        notebook_shell.run_cell(f"%%distributed --np 1 --cpu --dry-run --sweep lr=1,2,3 {jobs}\nlr")
        assert f"3 runs, {said}" in capsys.readouterr().out


def test_an_inline_rank_runs_one_after_another(notebook_shell: InteractiveShell) -> None:
    notebook_shell.run_cell("lr = 1")
    cell = "%%distributed --on inline --quiet --sweep lr=2,3,0\nif lr == 3: raise KeyboardInterrupt\nlr"
    with pytest.raises(GangStoppedError, match="1 succeeded, 1 failed, 1 stopped"):
        run(notebook_shell, cell)
