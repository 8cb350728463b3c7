from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrogen_magic.core.argument_types import parse_duration_s, parse_size_bytes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.notebook.arguments.distributed import around_sweeps, parse, usage
from hydrogen_magic.notebook.arguments.gang import GangCommand, parse_gang
from hydrogen_magic.notebook.arguments.infer import parse_infer
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError


def test_every_option_reaches_the_spec() -> None:
    line = (
        "-n 4 --on local --with torch --gpu --spread --out model,history --out loss --retries 2 "
        "--timeout 5m --start-timeout 30 --grace 1.5 --env A=1 --env 'B=x y' --env C=#fff "
        "--max-closure 2GiB --timeline trace.json --detach --quiet --dry-run --save train.py --seed 7 "
        "--session lab --ranks 2,0 --idle 10m"
    )
    arguments = parse(line)
    assert arguments.spec == JobSpec(
        np=4,
        placement="local",
        rendezvous="torch",
        gpu=True,
        pack=False,
        out=("model", "history", "loss"),
        retries=2,
        timeout_s=300.0,
        start_timeout_s=30.0,
        grace_s=1.5,
        env=(("A", "1"), ("B", "x y"), ("C", "#fff")),
        max_closure_bytes=2 << 30,
        timeline="trace.json",
        detach=True,
        quiet=True,
        seed=7,
        session="lab",
        on_ranks=(0, 2),
        idle_s=600.0,
    )
    assert arguments.dry_run and arguments.save == "train.py" and arguments.script is None


def test_the_line_wins_over_the_defaults_and_leaves_the_rest() -> None:
    defaults = JobSpec(np=8, retries=1, gpu=True)
    assert parse("", defaults=defaults).spec == defaults
    assert parse("--np 3 --cpu", defaults=defaults).spec == JobSpec(np=3, retries=1, gpu=False)


def test_an_option_that_is_not_given_sets_no_field() -> None:
    """Otherwise it would override %config: argparse's default of a flag is False."""
    assert parse("").given == frozenset()
    assert parse("train.py", is_cell=False).given == frozenset()
    assert parse_infer("df", defaults=JobSpec()).given == frozenset()


def test_a_session_knows_what_the_line_itself_sets() -> None:
    defaults = JobSpec(np=8, gpu=True)
    arguments = parse("--session --np -2 --cpu", defaults=defaults)
    assert arguments.spec.session == "main"
    assert arguments.given >= {"np", "placement", "gpu"} and "rendezvous" not in arguments.given


@pytest.mark.parametrize("line", ["--np -2", "-n -2", "--np=-2", "-n-2"])
def test_a_negative_number_of_ranks_means_this_machine(line: str) -> None:
    spec = parse(line, defaults=JobSpec(placement="spark")).spec
    assert (spec.np, spec.placement) == (2, "local")


def test_inline_means_one_rank_whatever_the_default_is() -> None:
    assert parse("--on inline", defaults=JobSpec(np=4)).spec.np == 1
    assert parse("--on inline --np 1").spec.np == 1
    assert parse("", defaults=JobSpec(np=4, placement="inline")).spec.np == 1


def test_a_gang_that_outlives_its_kernel_is_detached() -> None:
    assert parse("--outlive").spec == JobSpec(outlive=True, detach=True)


@pytest.mark.parametrize("line", ["--outlive", "--detach", "--sweep lr=1,2"])
def test_pdb_on_is_ignored_where_no_cell_waits_for_its_gang(line: str) -> None:
    with_pdb_on = JobSpec(pdb=True)
    assert not parse(line, defaults=with_pdb_on).spec.pdb
    assert parse("", defaults=with_pdb_on).spec.pdb


@pytest.mark.parametrize("comment", ["# one isn't enough", "#don't", "#'", "#"])
def test_a_comment_ends_the_line(comment: str) -> None:
    assert parse(f"--np 3  {comment}").spec.np == 3


def test_a_quoted_word_may_begin_with_a_hash() -> None:
    line = """--name "#3 wide" train.py --tag '#1' \\#2 --lr 0.5 # --np 4"""
    arguments = parse(line, is_cell=False)
    assert arguments.spec.name == "#3 wide"
    assert arguments.script_args == ("--tag", "#1", "#2", "--lr", "0.5")
    assert parse_gang("stop '#1'").gang == "#1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--npp 3", "did you mean --np?"),
        ("--on sprak", "did you mean spark?"),
        ("--with troch", "did you mean torch?"),
        ("--np 0", "at least one rank"),
        ("--np two", "whole number, got 'two'"),
        ("--np", "expected one argument"),
        ("4", "did you mean --np 4?"),
        ("np=4", "did you mean --np 4?"),
        ("train.py", "write %distributed train.py"),
        ("--gpu --cpu", "not allowed with argument --gpu"),
        ("--pack --spread", "not allowed with argument --pack"),
        ("--on inline --np 2", "one rank inside the kernel, so --np 2 is not possible"),
        ("--on inline --detach", "--detach is not possible with --on inline"),
        ("--on inline --outlive", "--outlive is not possible with --on inline"),
        ("--np -2 --on spark", "--np -2 means 2 ranks on this machine"),
        ("--retries -1", "0 or more"),
        ("--timeout soon", "5m or 1h30m"),
        ("--timeout 0", "5m or 1h30m"),
        ("--env PATH", "NAME=VALUE, got 'PATH'"),
        ("--env RANK=1", "env sets RANK"),
        ("--with mpi", "choose horovod, jax, tensorflow or torch"),
        ("--out model.weight", "variable names"),
        ("--out class", "variable names"),
        ("--max-closure lots", "500MB or 2GiB"),
        ("--save train", "ends in .py"),
        ("--sweep-jobs 2", "add --sweep"),
        ("--sweep lr=1,2 --sweep-jobs 0", "1 or more"),
        ("--sweep lr", "--sweep: should be NAME=VALUE,VALUE"),
        ("--sweep --np 2", "--sweep: should be NAME=VALUE,VALUE, like lr=0.1,0.01; got ''"),
        ("--sweep lr=1,2 -x", "unknown option -x"),
        ("--sweep lr=1 --sweep lr=2", "given twice"),
        ("--sweep lr=1,2 --detach", "cannot be combined with --detach"),
        ("--sweep lr=1,2 --outlive", "cannot be combined with --outlive"),
        ("--sweep lr=1,2 --session", "cannot be combined with --session"),
        ("--session --outlive", "a session ends with its kernel"),
        ("--pdb --outlive", "drop --pdb or --outlive"),
        ("--pdb --detach", "drop --pdb or --detach"),
        ("--sweep lr=1,2 --pdb", "its runs have no input line"),
        ("--sweep lr=1,2 --save all.py", "one value of each name"),
        ("--sweep lr=1,2 --timeline all.json", "write the same file"),
        ("--env 'A=1", "unclosed quotation mark"),
        ("--ranks 2", "ranks 2: the ranks are 0 to 1"),
        ("--sweep lr=1,2 --ranks 0", "--sweep cannot be combined with --ranks"),
        ("--session --ranks a", "should be numbers of ranks, like 0,2; got 'a'"),
        ("--display first", "should be all, or numbers of ranks like 0,2; got 'first'"),
        (f"--seed {2**63}", "should be below 2**63, got 9223372036854775808"),
        ("--out model, y", "write a list without spaces: model,y"),
        ("--np 2 --out a, b, c --cpu", "write a list without spaces: a,b,c"),
        ("--session --ranks 0, 1", "write a list without spaces: 0,1"),
        ("--timeout 3 s", "without spaces, as in --out a,b and --timeout 3s"),
    ],
)
def test_a_wrong_line_is_answered_with_what_would_be_right(line: str, said: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        parse(line)
    assert said in str(caught.value)


def test_values_of_a_sweep_may_have_spaces_between_them() -> None:
    swept = parse("--sweep lr=0.1, -1 -n 3 --timeline --sweep layers=[8, 8], [16] --sweep='x=1, 2'")
    assert swept.sweep == (("lr", "0.1, -1"), ("layers", "[8, 8], [16]"), ("x", "1, 2"))
    assert swept.spec == JobSpec(np=3, timeline="")


@pytest.mark.parametrize("values", ["1, 2, -3, 4", "1, -inf, 2", "1,  -math.inf", "-inf, -n"])
def test_values_of_a_sweep_may_be_negative(values: str) -> None:
    line = f"--sweep lr={values} -n 3 --quiet"
    ((_, found),) = parse(line).sweep
    assert found == " ".join(values.split())
    assert around_sweeps(line) == ["", f"--sweep lr={values}", " -n 3 --quiet"]


@given(st.text(max_size=40))
def test_any_line_parses_or_raises_our_error(line: str) -> None:
    for form in (parse, partial(parse, is_cell=False), parse_gang):
        with contextlib.suppress(ArgumentsError):
            form(line)


# ── the line form ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "script", "args", "as_module"),
    [
        ("train.py", "train.py", (), False),
        ("--np 3 train.py --np 7 -m x -h", "train.py", ("--np", "7", "-m", "x", "-h"), False),
        ("--np 3 -m pkg.train --lr 3", "pkg.train", ("--lr", "3"), True),
        ("-- train.py --quiet", "train.py", ("--quiet",), False),
        ("'my train.py' 'a b'", "my train.py", ("a b",), False),
        ("--np 2 train.py --timeline q.json", "train.py", ("--timeline", "q.json"), False),
        ("--timeline train.py x", "train.py", ("x",), False),
    ],
)
def test_what_follows_the_script_is_its_own(
    line: str, script: str, args: tuple[str, ...], as_module: bool
) -> None:
    found = parse(line, is_cell=False)
    assert (found.script, found.script_args, found.as_module) == (script, args, as_module)


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("missing/t.json", "there is no directory 'missing'"),
        ("/", "is a directory"),
        ("/proc/version", "permission denied"),
    ],
)
def test_a_timeline_that_cannot_be_written_is_refused(file: str, found: str) -> None:
    if file == "/proc/version" and os.access(file, os.W_OK):
        pytest.skip("this user may write everything")
    with pytest.raises(ArgumentsError, match=found):
        parse(f"--timeline {file}")


def test_files_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cell = parse("--save ~/x.py --timeline ~/x.json")
    assert (cell.save, cell.spec.timeline) == (f"{tmp_path}/x.py", f"{tmp_path}/x.json")
    assert parse_gang("timeline 3f -o ~/x.json").file == f"{tmp_path}/x.json"


def test_a_timeline_file_before_a_script_is_a_json_file() -> None:
    arguments = parse("--timeline t.json train.py", is_cell=False)
    assert (arguments.spec.timeline, arguments.script) == ("t.json", "train.py")
    assert parse("--timeline train.py", is_cell=False).spec.timeline == ""
    assert parse("--timeline --np 3").spec.timeline == ""
    assert parse("").spec.timeline is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "needs a script or -m module"),
        ("--np 2 -m", "needs a script or -m module"),
        ("--sweep lr=1,2 train.py", "values that a cell uses"),
        ("--sweep-jobs 2 train.py", "values that a cell uses"),
        ("--npp 2 train.py", "did you mean --np?"),
        ("--out model train.py", "a script has none"),
        ("--session=a train.py", "^%distributed has no --session: .* option of %%distributed$"),
    ],
)
def test_a_wrong_script_line_is_explained(line: str, said: str) -> None:
    with pytest.raises(ArgumentsError, match=said):
        parse(line, is_cell=False)


def test_help_of_scripts_is_followed_by_that_of_cells() -> None:
    refused = ("--out", "--save", "--sweep", "--sweep-jobs", "--session")
    script, _, cells = usage(is_cell=False).partition("usage: %%distributed")
    assert not any(f"{option} " in script for option in refused)
    assert usage() == f"usage: %%distributed{cells}"
    assert all(f"{option} " in cells for option in refused)
    assert "--sweep NAME=V,V  " in cells and "..." not in cells


# ── %gang ────────────────────────────────────────────────────────────────────────────────────────


def test_gang_commands() -> None:
    assert parse_gang("") == GangCommand("list")
    assert parse_gang("stop --all") == GangCommand("stop", all=True)
    assert parse_gang("logs 3f --rank 1") == GangCommand("logs", gang="3f", rank=1)
    assert parse_gang("timeline 3f -o t.json") == GangCommand("timeline", gang="3f", file="t.json")
    assert parse_gang("attach 3f --take") == GangCommand("attach", gang="3f", take=True)
    assert parse_gang("attach --out a,b") == GangCommand("attach", out=("a", "b"))
    assert parse_gang("wait 3f --timeout 1m") == GangCommand("wait", gang="3f", timeout_s=60.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stpo", "did you mean stop?"),
        (
            "close",
            "%gang close is not a command; %gang stop stops a gang, %gang end ends a session",
        ),
        ("reset", "choose list, show"),
        ("list 3f", "%gang list has no arguments"),
        ("show wide lr=0.1 x=1", 'needs quotation marks: %gang show "wide lr=0.1 x=1"'),
        ("end my lab", 'needs quotation marks: %gang end "my lab"'),
        ("end --all", "%gang end has no options"),
        ("attach 3f --out a, b", "write a list without spaces: a,b"),
        ("stop 3f --al", "did you mean --all?"),
        ("stop 3f --all", "not both"),
        ("timeline 3f", "-o trace.json"),
        ("logs 3f --rank one", "whole number"),
        ("stop --help", "take control from another kernel"),
    ],
)
def test_a_wrong_gang_command_is_explained(line: str, said: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        parse_gang(line)
    assert said in str(caught.value)


# ── units ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5h", 5400), ("5m", 300), ("1h30m", 5400), ("200ms", 0.2)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("1000", 1000), ("2GiB", 2 << 30), ("1g", 1 << 30), ("500MB", 500_000_000), ("1.5k", 1536)],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size_bytes(text) == n_bytes
