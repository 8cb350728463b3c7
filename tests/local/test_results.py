"""Results come home: whatever they are, and however the gang ends."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.errors import HydrogenError, RankFailedError, ResultError
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject
from tests import result_checks, result_ranks
from tests.gangs import ended, failure_of, notices_of, until, wait_until
from tests.result_checks import run_cell

pytestmark = pytest.mark.usefixtures("warm_agents")


def test_every_name_comes_home_or_is_reported(notebook_shell: InteractiveShell) -> None:
    result_checks.check_every_name(notebook_shell, "")


def test_a_models_optimizer_goes_on_after_a_cell(notebook_shell: InteractiveShell) -> None:
    run_cell(
        notebook_shell,
        "import torch\nnet = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=1.0)\n"
        "first = net.weight",
    )
    run_cell(
        notebook_shell,
        "%%distributed --np 2 --quiet --out net,opt\n"
        "net(torch.ones(1, 2)).sum().backward()\nopt.step()",
    )
    run_cell(
        notebook_shell,
        "changed = first.clone()\nnet(torch.ones(1, 2)).sum().backward()\nopt.step()\n"
        "assert net.weight is first and torch.allclose(first, changed - 1)",
    )


def test_a_model_comes_back_without_its_wrapper(notebook_shell: InteractiveShell) -> None:
    """The wrapper belongs to ranks that have ended; the trained weights must not end with them."""
    run_cell(
        notebook_shell,
        "import torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "model = notebooks_own = torch.nn.Linear(2, 1)\nlearner = {'model': torch.nn.Linear(2, 1)}",
    )
    run_cell(
        notebook_shell,
        "%%distributed --np 2 --out model,learner\n"
        "dist.init_process_group('gloo')\n"
        "class Averaged(DistributedDataParallel): pass\n"
        "model = DistributedDataParallel(model)\n"
        "learner['model'] = Averaged(learner['model'])\n"
        "with torch.no_grad(): model.module.weight.fill_(3)\n"
        "model",
    )
    run_cell(
        notebook_shell,
        "assert model is notebooks_own and _ is model and model.weight.tolist() == [[3.0, 3.0]]\n"
        "assert type(learner['model']) is torch.nn.Linear",
    )
    *_, gang = known_gangs.gangs().values()
    said = notices_of(gang)
    assert said.count("`model` comes back without its DistributedDataParallel") == 1
    assert said.count("`learner` comes back without its Averaged") == 1


def test_unpicklable_parts() -> None:
    gang = ended(hm.launch(result_ranks.partly_unpicklable, np=2))
    first, second = gang.results
    assert isinstance(first, ResultError) and "`[1]['lock']` of its value" in str(first)
    assert isinstance(second, ResultError) and "rank 1" in str(second)
    kept = hm.load_results(gang.id)["_"]
    assert kept[1]["array"].tolist() == [1, 1, 1] and isinstance(kept[1]["lock"], MissingObject)


def test_results_of_a_failed_gang() -> None:
    n_bytes = 5 << 20
    gang = hm.launch(result_ranks.failure_after_others, n_bytes, np=3)
    assert isinstance(failure_of(gang), RankFailedError)
    load = f"hydrogen_magic.load_results('{gang.id}')"
    assert (
        f"the results of ranks 0 and 1 (the value) are saved in the record of the gang; load them with {load}"
        in notices_of(gang)
    )
    for rank in range(2):
        assert np.array_equal(
            hm.load_results(gang.id, rank)["_"], np.full(n_bytes, rank + 1, np.uint8)
        )
    with pytest.raises(HydrogenError, match="no results of rank 2 are saved"):
        hm.load_results(gang.id, 2)


def test_sharded_results() -> None:
    import torch

    expected = result_ranks.new_model()
    result_ranks.step(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))
    found, same = ended(hm.launch(result_ranks.sharded, np=2)).results
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


def test_sharded_results_that_cannot_be_gathered_are_refused() -> None:
    for function, args, why in (
        (result_ranks.sharded_on_rank_0_alone, (), "rank 1 has no such tensor"),
        (result_ranks.sharded_and_left, (0, 1), "this rank has destroyed its process group"),
        (result_ranks.sharded_and_left, (1,), "rank 1 has destroyed its process group"),
    ):
        with pytest.raises(ResultError, match=why) as caught:
            _ = ended(hm.launch(function, *args, np=2)).result
        assert ".full_tensor()" in str(caught.value)


FSDP1 = """%%distributed --np 2 --quiet --out sharded,opt,inner,flat,parts,zero,weights,moved
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


def test_fsdp1_is_refused_and_its_full_state_comes_home(notebook_shell: InteractiveShell) -> None:
    """What holds a part of a model or of an optimizer is refused by name; the call that the error names
    brings all of it home.
    """
    run_cell(notebook_shell, "from tests.result_ranks import new_model, step\nimport torch")
    with pytest.raises(ResultError) as caught:
        run_cell(notebook_shell, FSDP1)
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
        notebook_shell,
        "expected = new_model()\noptimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)\n"
        "step(expected, optimizer)\ntorch.testing.assert_close(dict(weights), dict(expected.state_dict()))\n"
        "moments = [one['exp_avg'] for one in optimizer.state.values()]\n"
        "torch.testing.assert_close([one['exp_avg'] for one in moved['state'].values()], moments)",
    )


def test_a_crash_while_packing_loses_nothing_that_was_packed(
    notebook_shell: InteractiveShell,
) -> None:
    run_cell(notebook_shell, "from tests.result_ranks import Crashes")
    with pytest.raises(RankFailedError, match=r"SIGSEGV \(while packing `crashes`\)"):
        run_cell(
            notebook_shell,
            "%%distributed --np 2 --quiet --out kept,_,crashes,lost\n"
            "kept, _, crashes, lost = [1], 'variable', Crashes(), 2",
        )
    gang = list(hm.gangs().values())[-1]
    assert hm.load_results(gang.id) == {"kept": [1], "_": "variable"}


def test_a_rank_that_never_exits_does_not_hold_the_result() -> None:
    gang = ended(hm.launch(result_ranks.returns_and_hangs, np=2))
    assert gang.results == [0, 1]
    why = "did not exit within 5 s of its result (1 thread still running: my-thread; in the cell, join it"
    assert why in notices_of(gang)
    left_s = [at_s[ev.RankExited] - at_s[ev.RankResult] for at_s in times_of(gang).values()]
    # It takes 60 s to give up a rank that computes.
    assert len(left_s) == 2 and max(left_s) <= 15.0, left_s


def times_of(gang: hm.Gang) -> dict[int, dict[type[ev.Event], float]]:
    """Return rank -> kind of event -> when the last one happened."""
    found: dict[int, dict[type[ev.Event], float]] = {}
    for event in gang.events():
        if isinstance(event, ev.RankEvent):
            found.setdefault(event.rank, {})[type(event)] = event.at_s
    return found


def test_an_optimizer_that_a_library_has_wrapped_is_refused() -> None:
    gang = ended(hm.launch(result_ranks.wrapped_optimizer, np=1))
    with pytest.raises(ResultError, match=r"has wrapped it for the ranks; .* `\.state_dict\(\)`"):
        _ = gang.result


@pytest.mark.exhaustive  # five gigabytes
def test_the_view_counts_the_bytes_of_a_large_result(notebook_shell: InteractiveShell) -> None:
    result_checks.check_the_view_counts_bytes(notebook_shell, "", 5_000_000_000)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_the_kernel_frees_what_it_has_captured(notebook_shell: InteractiveShell) -> None:
    result_checks.check_that_captured_arrays_are_freed(notebook_shell, "")


def test_the_closure_is_freed_once_the_ranks_run(tmp_path: Path) -> None:
    """Unless another attempt may need it."""
    data = np.ones(8 << 20, np.uint8)
    for retries in (0, 1):
        over = tmp_path / f"over-{retries}"
        gang = hm.launch(result_ranks.waits_for_a_file, data, str(over), np=1, retries=retries)
        until(gang, lambda gang=gang: all(rank.phase == "running" for rank in gang.ranks))
        # The hub frees the closure after the state has changed.
        wait_until(lambda retries=retries: len(closure_files()) == retries)
        over.touch()
        assert ended(gang).results == [len(data)]
        assert closure_files() == []


def test_results_are_freed_with_the_notebooks_variables(
    notebook_shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_gangs, "_LARGE_BYTES", 1 << 20)
    wait_until(all_results_are_freed)  # those of the test before
    run_cell(notebook_shell, "import numpy as np\nold = np.zeros(2 << 20, np.uint8)")
    run_cell(notebook_shell, "%%distributed --np 1 --quiet --out old\nold += 1")
    assert mapped_results() == [], "the array has got the new values"
    run_cell(notebook_shell, "%%distributed --np 1 --quiet --out new\nnew = old + 1")
    assert len(mapped_results()) == 1 and notebook_shell.user_ns["new"].sum() == 4 << 20
    run_cell(notebook_shell, "del new")
    ended(hm.launch(len, [], np=1))
    # The hub lets go of a gang after its end.
    wait_until(all_results_are_freed)


def mapped_results() -> list[str]:
    """Return the results of ranks whose bytes this process holds."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "hydrogen_magic:result" in line]


def all_results_are_freed() -> bool:
    gc.collect()
    return mapped_results() == []


def closure_files() -> list[str]:
    """Return the closures that this process holds open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing itself
            continue
    return [link for link in links if "hydrogen_magic:closure" in link]
