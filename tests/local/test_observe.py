"""What a rank reports by itself: real tqdm, torch's optimizers, collectives of two ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from tests import ranks
from tests.gangs import ended, notices_of, until
from tests.observed import run

pytestmark = pytest.mark.usefixtures("warm_agents")


def test_bars_are_reported_and_not_printed(tmp_path: Path) -> None:
    ended = run(
        """
        from tqdm import tqdm, trange
        for _ in trange(3, desc="outer", leave=False):
            for _ in tqdm(range(10), file=sys.stdout):
                pass
        manual = tqdm(total=100, unit="B")
        manual.update(30)
        manual.set_description("manual")
        manual.set_postfix(loss=0.25)
        tqdm.write("between the bars")
        flush()
        for _ in tqdm(range(5), disable=True, desc="disabled"): pass
        for _ in tqdm(range(5), None, None, True, sys.stderr): pass
        for _ in tqdm(range(1000), desc="left early"): break
        manual.close()
        """,
        tmp_path,
    )
    assert (ended.stdout, ended.stderr) == ("between the bars\n", "")
    manual = [bar for bar in ended.of(ev.Progress) if bar.desc.startswith("manual")]
    assert (manual[0].desc, manual[0].n, manual[0].closed) == ("manual [loss=0.25]", 30, False)
    assert manual[0].unit == "B"
    assert ended.bars == [
        ("outer", 3, 3, True),
        ("", 10, 10, True),
        ("", 10, 10, True),
        ("", 10, 10, True),
        ("manual [loss=0.25]", 30, 100, True),
        ("", 5, 5, True),
        ("left early", 0, 1000, True),
    ]


def test_bars_to_the_users_own_file_print_as_usual(tmp_path: Path) -> None:
    ended = run(
        """
        import contextlib, io, pickle
        import tqdm.std
        captured, redirected = io.StringIO(), io.StringIO()
        for _ in tqdm.tqdm(range(3), file=captured, ncols=40): pass
        with contextlib.redirect_stderr(redirected):
            for _ in tqdm.tqdm(range(3), ncols=40): pass
        for text in (captured.getvalue(), redirected.getvalue()):
            assert "100%" in text and text.endswith("\\n"), text
        class Mine(tqdm.std.tqdm):
            pass
        assert pickle.loads(pickle.dumps(tqdm.std.tqdm)) is tqdm.std.tqdm
        assert isinstance(Mine(range(2)), tqdm.tqdm)
        child = os.fork()
        if child == 0:
            list(tqdm.tqdm(range(2), ncols=40))
            os._exit(0)
        os.waitpid(child, 0)
        """,
        tmp_path,
    )
    assert "100%" in ended.stderr  # the child is no rank: its bar is its own affair
    assert [bar[1] for bar in ended.bars] == [3, 3, 0]


def test_notebook_bars_become_plain_ones(tmp_path: Path) -> None:
    ended = run(
        """
        import tqdm
        from tqdm.auto import tqdm as automatic
        from tqdm.notebook import tqdm as notebook, trange
        for _ in automatic(range(1), desc="auto"): pass
        for _ in notebook(range(2), desc="notebook", display=False): pass
        for _ in trange(3): pass
        for _ in tqdm.tqdm_notebook(range(4)): pass
        assert isinstance(notebook([]), tqdm.tqdm)
        assert not {"IPython", "ipywidgets"} & set(sys.modules)
        """,
        tmp_path,
    )
    assert (ended.stdout, [bar[1] for bar in ended.bars][:3]) == ("", [1, 2, 3])
    assert "deprecat" in ended.stderr.lower()  # tqdm's own warning of tqdm_notebook, nothing else
    assert "%" not in ended.stderr


def test_rich_progress_is_reported_and_not_drawn(tmp_path: Path) -> None:
    ended = run(
        """
        os.environ["FORCE_COLOR"] = "1"  # of kernels: rich takes each output for a terminal
        import io, warnings
        from rich.console import Console
        from rich.progress import Progress, track
        from tqdm.rich import tqdm
        for _ in track(range(10), description="[red]tracked"):
            pass
        plain = Console(force_terminal=False)
        for _ in track(range(6), description="plain", console=plain):
            pass
        with Progress() as progress:
            first = progress.add_task("first", total=4)
            hidden = progress.add_task("hidden", visible=False)
            endless = progress.add_task("endless", total=None)
            progress.console.print("between the bars")
            for _ in range(4):
                progress.advance(first)
                progress.update(endless, advance=2, description="endless [1", progress=5)
            progress.update(task_id=first, description="finished")
            flush()
            progress.reset(first, total=2)
            progress.remove_task(progress.add_task("removed"))
            progress.advance(first)
        warnings.simplefilter("ignore")  # tqdm calls it experimental
        for _ in tqdm(range(3), desc="of tqdm"):
            pass
        file = io.StringIO()
        for _ in track(range(5), description="mine", console=Console(file=file)):
            pass
        assert "100%" in file.getvalue()
        for _ in track(range(5), description="disabled", disable=True):
            pass
        """,
        tmp_path,
    )
    assert (ended.stdout, ended.stderr) == ("between the bars\n", "")
    assert ended.bars == [
        ("tracked", 10, 10, True),
        ("plain", 6, 6, True),
        ("first", 4, 4, True),
        ("endless [1", 8, None, True),
        ("finished", 1, 2, True),
        ("removed", 0, 100, True),
        ("of tqdm", 3, 3, True),
        ("mine", 5, 5, True),
    ]


def test_an_observer_that_fails_leaves_the_library_alone(tmp_path: Path) -> None:
    ended = run(
        """
        def fails(module):
            raise AttributeError("another version")
        sys.modules["broken"] = types.SimpleNamespace(fails=fails)
        from functools import partial
        from hydrogen_magic.node.worker.import_hooks import hooks
        for function in ("broken:fails", "missing:attach"):
            hooks.add("tqdm.std", partial(observe._attach, function))
        import tqdm
        assert list(tqdm.tqdm(range(3), disable=True)) == [0, 1, 2]
        assert tqdm.std.__loader__.get_source("tqdm.std")
        """,
        tmp_path,
    )
    warnings = [notice.text for notice in ended.of(ev.Notice) if notice.level == "warning"]
    assert ["tqdm.std" in text for text in warnings] == [True, True]
    assert "another version" in warnings[0]
    assert "No module named 'missing'" in warnings[1]


def test_a_module_of_the_closure_is_observed(tmp_path: Path) -> None:
    """As one beside the notebook, or an editable installation."""
    run(
        """
        from hydrogen_magic.node.worker import module_importer
        from hydrogen_magic.node.worker.import_hooks import hooks
        from hydrogen_magic.serialization.closure import ModuleSource
        hooks.add("my_library", lambda module: setattr(module, "seen", True))
        module_importer.install({"my_library": ModuleSource("", "/nowhere/my_library.py")})
        import my_library
        assert my_library.seen
        """,
        tmp_path,
    )


def test_observers_import_no_library(tmp_path: Path) -> None:
    run(
        """
        loaded = {name.partition(".")[0] for name in sys.modules}
        unwanted = {"torch", "tqdm", "numpy", "pandas", "IPython", "zmq", "psutil", "rich"}
        assert not loaded & unwanted, loaded & unwanted
        """,
        tmp_path,
    )


def meet(late: str, over: str) -> bool:
    """Take five steps with each of two optimizers, then have rank 0 wait for rank 1 until there is a file
    ``late``. Return whether a collective that was started, and not waited for, counted as a wait.
    """
    import torch
    import torch.distributed as dist
    from torch import optim
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    from hydrogen_magic.node.worker.reporting import reporter

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    first, second = optim.SGD(model.parameters(), lr=0.1), optim.Adam(model.parameters())
    get_optimizer_state_dict(model, second)  # steps with gradients of zero
    for _ in range(5):
        for optimizer in (first, second):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    rank = reporter.current()
    assert rank is not None and work is not None
    is_waiting = rank.collectives.current is not None
    work.wait()
    while dist.get_rank() == 1 and not Path(late).exists():
        time.sleep(0.01)
    gathered = [None, None]
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == [0, 1]
    while not Path(over).exists():
        time.sleep(0.01)
    dist.destroy_process_group()
    return is_waiting


def test_steps_and_waits_of_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    late, over = tmp_path / "late", tmp_path / "over"
    gang = hm.launch(meet, str(late), str(over), np=2)
    until(gang, lambda: gang.ranks and gang.ranks[0].waiting_in.startswith("all_gather_object"))
    late.touch()
    until(gang, lambda: not gang.ranks[0].waiting_in)
    over.touch()
    assert ended(gang).results == [False, False]
    assert [rank.steps for rank in gang.ranks] == [5, 5]
    waits = [event for event in gang.events() if isinstance(event, ev.CollectiveWait)]
    of_rank_0 = [w for w in waits if w.rank == 0 and w.name in ("all_gather_object", "")]
    began, left, _ = of_rank_0[-3:]  # the last is the number of all, at the end
    assert (began.name, began.at_s - began.since_s > 1.0) == ("all_gather_object", True)
    assert (left.name, left.seq) == ("", began.seq)
    assert "all_gather_object" not in {wait.name for wait in waits if wait.rank == 1}


def build(folder: str) -> str:
    """Compile what is not there; then wait for the lock of a build here, and of one that was killed."""
    import os
    import threading

    from torch.utils import cpp_extension

    try:
        cpp_extension.load("fused", ["missing.cpp"], build_directory=folder)
    except Exception as error:
        failure = type(error).__name__
    lock = f"{folder}/lock"
    builder = cpp_extension.FileBaton(lock)
    for is_built_here in (True, False):
        assert builder.try_acquire()
        if not is_built_here:
            os.close(builder.fd)  # as of a process that was killed
            builder.fd = None
        if is_built_here:
            threading.Timer(0.2, builder.release).start()
        cpp_extension.FileBaton(lock).wait()
    return failure


def test_extensions_are_compiled_visibly(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        pytest.skip("torch uses locks of the operating system since 2.15")
    gang = hm.launch(build, str(tmp_path), np=1)
    until(gang, lambda: "which no process of this machine has open" in notices_of(gang))
    (tmp_path / "lock").unlink()  # as the notice says
    ended(gang).raise_for_state()
    phases = [event for event in gang.events() if isinstance(event, ev.RankPhase)]
    details = [event.detail for event in phases if event.phase == "running"]
    assert [text for text in details if text] == ["compiling fused"] and details[-1] == ""
    [notice] = notices_of(gang).splitlines()
    assert f"waits for {tmp_path}/lock, which no process of this machine has open" in notice


def compile_by_torch() -> float:
    import torch

    return float(torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1)))


def test_functions_are_compiled_visibly() -> None:
    gang = ended(hm.launch(compile_by_torch, np=1))
    assert gang.result == 2.0
    phases = [event for event in gang.events() if isinstance(event, ev.RankPhase)]
    details = [event.detail for event in phases if event.phase == "running" and event.detail]
    assert details == ["compiling (torch.compile)"]


def test_warnings_of_libraries_name_the_users_line(tmp_path: Path) -> None:
    """Also a DeprecationWarning, which Python shows for lines of ``__main__`` alone."""
    ended = run(
        """
        import warnings
        import torch
        import torch.distributed as dist
        from hydrogen_magic.node.worker.observe.collectives import tracked_collective
        from hydrogen_magic.node.worker.observe.helpers import claiming, followed
        from hydrogen_magic.node.worker.observe.span_recording import recorded
        def library(text):
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        def noted(*results): pass
        wrapped = tracked_collective("a", claiming(recorded("b", followed(library, noted))))
        print(sys._getframe().f_lineno + 2)
        for rank.is_recording in (False, True):
            wrapped(str(rank.is_recording))
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        model = torch.nn.Linear(1, 1)
        torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        """,
        tmp_path,
    )
    line = int(ended.stdout)
    warned = [text for text in ended.stderr.splitlines() if text.startswith("<string>:")]
    assert warned[:2] == [
        f"<string>:{line}: DeprecationWarning: {recording}" for recording in (False, True)
    ], ended.stderr
    assert warned[2].startswith(f"<string>:{line + 3}: FutureWarning: "), ended.stderr


def test_stacks_of_the_anomaly_mode_begin_in_the_cell() -> None:
    text = hm.run(ranks.anomaly, np=1, quiet=True)
    first = text.splitlines()[1]
    assert first.endswith(", in anomaly") and "hydrogen_magic/node" not in text, text
