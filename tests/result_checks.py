"""Checks of results that hold on every placement."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import size_text
from hydrogen_magic.errors import HydrogenError, RankFailedError, ResultError
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject
from tests import result_ranks
from tests.gangs import ended, failure_of, notices_of


def run_cell(shell: InteractiveShell, cell: str) -> Any:
    done = shell.run_cell(cell)
    done.raise_error()
    return done.result


def check_every_name(shell: InteractiveShell, options: str, library: str = "torch") -> None:
    """``library``: of the array among the results, ``torch`` or ``numpy``."""
    run_cell(
        shell,
        f"import threading, {library} as arrays\n"
        "kept, gone, alias_of = [0], 1, [0]\nalias = alias_of",
    )
    with pytest.raises(ResultError) as caught:
        run_cell(
            shell,
            f"%%distributed --np 2 --quiet --out locked,kept,gone,branch,alias_of {options}\n"
            "import os\nlocked = {'weights': arrays.ones(3), 'lock': threading.Lock()}\n"
            "kept = [1]\nalias.append(2)\ndel gone\n"
            "if os.environ['RANK'] == '1': branch = 3\n"
            "(n for n in kept)",
        )
    lines = str(caught.value).splitlines()
    assert shell.user_ns["kept"] == [1] and shell.user_ns["alias_of"] == [0, 2]
    assert shell.user_ns["gone"] == 1, "it keeps its value"
    for name, remedy in (
        ("`gone` (--out) is not defined", "or leave it out of --out"),
        ("`branch` (--out) is not defined", "or leave it out of --out"),
        ("`locked['lock']`", "or leave it out with __getstate__"),
        ("last expression", "or end the cell with `None`"),
    ):
        (line,) = [line for line in lines if name in line]
        assert line.endswith(remedy), line
    assert lines[-1] == "`kept`, `alias_of` arrived and are assigned"
    (gang_id,) = [line.split("'")[1] for line in lines if "load_results" in line]
    rest = hm.load_results(gang_id)["locked"]
    assert rest["weights"].tolist() == [1, 1, 1] and isinstance(rest["lock"], MissingObject)


def check_slow_packing(**options: Any) -> None:
    gang = ended(hm.launch(result_ranks.Slow, 6.0, np=1, **options))
    assert (gang.result.seconds, gang.snapshot().reason) == (6.0, "1 rank finished")
    assert "packing the value" in details_of(gang), "the view shows why"


def details_of(gang: hm.Gang) -> list[str]:
    """Return what the view said about the phases of ranks."""
    return [event.detail for event in gang.events() if isinstance(event, ev.RankPhase)]


def check_updates_in_place(shell: InteractiveShell, options: str) -> None:
    run_cell(
        shell,
        "import torch\nnet = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "first = net.weight",
    )
    run_cell(
        shell,
        f"%%distributed --np 2 --quiet --out net,opt {options}\n"
        "net(torch.ones(1, 2)).sum().backward()\nopt.step()",
    )
    run_cell(
        shell,
        "changed = first.clone()\nnet(torch.ones(1, 2)).sum().backward()\nopt.step()\n"
        "assert net.weight is first and torch.allclose(first, changed - 1)",
    )


def check_crash_while_packing(shell: InteractiveShell, options: str) -> None:
    run_cell(shell, "from tests.result_ranks import Crashes")
    with pytest.raises(RankFailedError, match=r"SIGSEGV \(while packing `crashes`\)"):
        run_cell(
            shell,
            f"%%distributed --np 2 --quiet --out kept,_,crashes,lost {options}\n"
            "kept, _, crashes, lost = [1], 'variable', Crashes(), 2",
        )
    gang = list(hm.gangs().values())[-1]
    assert hm.load_results(gang.id) == {"kept": [1], "_": "variable"}


def check_unpicklable_parts(**options: Any) -> None:
    gang = ended(hm.launch(result_ranks.partly_unpicklable, np=2, **options))
    first, second = gang.results
    assert isinstance(first, ResultError) and "`value[1]['lock']`" in str(first)
    assert isinstance(second, ResultError) and "rank 1" in str(second)
    kept = hm.load_results(gang.id)["_"]
    assert kept[1]["array"].tolist() == [1, 1, 1] and isinstance(kept[1]["lock"], MissingObject)


def check_results_of_a_failed_gang(**options: Any) -> None:
    n_bytes = 5 << 20
    gang = hm.launch(result_ranks.failure_after_others, n_bytes, np=3, **options)
    assert isinstance(failure_of(gang), RankFailedError)
    load = f"hydrogen_magic.load_results('{gang.id}')"
    assert (
        f"the results of ranks 0 and 1 (the value) are saved in the record of the gang; load them with {load}"
        in (notices_of(gang))
    )
    for rank in range(2):
        assert np.array_equal(
            hm.load_results(gang.id, rank)["_"], np.full(n_bytes, rank + 1, np.uint8)
        )
    with pytest.raises(HydrogenError, match="no results of rank 2 are saved"):
        hm.load_results(gang.id, 2)


def check_sharded_results(**options: Any) -> None:
    import torch

    expected = result_ranks.new_model()
    result_ranks.step(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))
    found, same = ended(hm.launch(result_ranks.sharded, np=2, **options)).results
    for model in (found["parallel"], found["fully"], same["parallel"]):
        assert type(model) is torch.nn.Sequential
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        torch.testing.assert_close(model(torch.ones(1, 8)), expected(torch.ones(1, 8)))
    torch.testing.assert_close(dict(found["weights"]), dict(expected.state_dict()))
    assert torch.equal(found["tensor"][0], torch.arange(32.0).reshape(8, 4))
    (group,) = found["optimizer"].param_groups
    assert group["params"][0] is next(found["parallel"].parameters())
    moments = [state["exp_avg"].shape for state in found["optimizer"].state.values()]
    assert moments == [parameter.shape for parameter in expected.parameters()]


def check_refusals_of_sharded_results(**options: Any) -> None:
    for function, args, why in (
        (result_ranks.sharded_on_rank_0_alone, (), "rank 1 has no such tensor"),
        (result_ranks.sharded_and_left, (0, 1), "this rank has destroyed its process group"),
        (result_ranks.sharded_and_left, (1,), "rank 1 has destroyed its process group"),
    ):
        with pytest.raises(ResultError, match=why) as caught:
            _ = ended(hm.launch(function, *args, np=2, **options)).result
        assert ".full_tensor()" in str(caught.value)


FSDP1 = """%%distributed --np 2 --quiet --out sharded,opt,inner,flat,parts,zero,weights,moved {options}
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo")
sharded = FullyShardedDataParallel(new_model(), device_id=torch.device("cpu"))
opt = torch.optim.AdamW(sharded.parameters(), lr=0.1)
step(sharded, opt)
inner, flat = sharded.module, opt.state_dict()
with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
    parts = sharded.state_dict()
zero = ZeroRedundancyOptimizer(new_model().parameters(), torch.optim.AdamW)
full = state_dict.StateDictOptions(full_state_dict=True)
weights, moved = state_dict.get_state_dict(sharded, opt, options=full)
"""


def check_fsdp1(shell: InteractiveShell, options: str) -> None:
    """What holds a part of a model or of an optimizer is refused by name; the call that the error names
    brings all of it home.
    """
    run_cell(shell, "from tests.result_ranks import new_model, step\nimport torch")
    with pytest.raises(ResultError) as caught:
        run_cell(shell, FSDP1.format(options=options))
    lines = str(caught.value).splitlines()
    states = "get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))"
    for name, call in (
        ("sharded` ", states.replace("_state_dict(model, opt", "_model_state_dict(model", 1)),
        ("opt.", states),
        ("inner.", states),
        ("flat['state']", states),
        ("parts[", states),
        ("zero` ", "opt.consolidate_state_dict()"),
    ):
        (line,) = [line for line in lines if line.startswith(f"`{name}")]
        assert f"`{call}`" in line, line
    assert lines[-1] == "`weights`, `moved` arrived and are assigned"
    run_cell(
        shell,
        "expected = new_model()\noptimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)\n"
        "step(expected, optimizer)\ntorch.testing.assert_close(dict(weights), dict(expected.state_dict()))\n"
        "moments = [one['exp_avg'] for one in optimizer.state.values()]\n"
        "torch.testing.assert_close([one['exp_avg'] for one in moved['state'].values()], moments)",
    )


def check_that_it_ends_after_its_result(**options: Any) -> None:
    gang = ended(hm.launch(result_ranks.returns_and_hangs, np=2, **options))
    assert gang.results == [0, 1]
    assert "did not exit within 5 s of its result" in notices_of(gang)
    left_s = [at_s[ev.RankExited] - at_s[ev.RankResult] for at_s in times_of(gang).values()]
    assert len(left_s) == 2 and max(left_s) <= 6.0, left_s


def times_of(gang: hm.Gang) -> dict[int, dict[type[ev.Event], float]]:
    """Return rank -> kind of event -> when the last one happened."""
    found: dict[int, dict[type[ev.Event], float]] = {}
    for event in gang.events():
        if isinstance(event, ev.RankEvent):
            found.setdefault(event.rank, {})[type(event)] = event.at_s
    return found


def check_that_captured_arrays_are_freed(shell: InteractiveShell, options: str) -> None:
    """Twenty cells, each with an array of its own.

    The first ones leave buffers for the way to Spark, of up to five arrays.
    """
    size = 8 << 20
    run_cell(shell, "import numpy as np")

    def run_with_another(value: int) -> None:
        run_cell(shell, f"data = np.full({size}, {value}, np.uint8)")
        cell = f"%%distributed --np 1 --quiet {options}\nlen(data), int(data[-1])"
        assert run_cell(shell, cell) == (size, value)
        run_cell(shell, "del data")

    run_with_another(0)
    before = psutil.Process().memory_info().rss
    for value in range(1, 21):
        run_with_another(value)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 8 * size, grown


def check_the_view_counts_bytes(shell: InteractiveShell, options: str, size: int) -> None:
    cell = f"%%distributed --np 1 --quiet --out big {options}\nimport numpy as np"
    run_cell(shell, f"{cell}\nbig = np.zeros({size}, np.uint8)")
    assert shell.user_ns.pop("big").nbytes == size
    gang = list(hm.gangs().values())[-1]
    counted = [each for each in details_of(gang) if each.startswith("sending")]
    line = rf"sending [\d.]+ [kMG]?B of {re.escape(size_text(size))}(: `big`)?"
    assert counted and all(re.fullmatch(line, each) for each in counted), counted
    del gang
    run_cell(shell, f"%%distributed --np 1 --quiet {options}\npass")
    gc.collect()
