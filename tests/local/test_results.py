"""Results come home: whatever they are, and however the gang ends."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.driver import launcher
from hydrogen_magic.errors import ResultError
from tests import result_checks, result_ranks
from tests.gangs import ended, until
from tests.result_checks import run_cell

pytestmark = pytest.mark.usefixtures("warm_agents")


def test_every_name_comes_home_or_is_reported(notebook_shell: InteractiveShell) -> None:
    result_checks.check_every_name(notebook_shell, "")


def test_a_models_optimizer_goes_on_after_a_cell(notebook_shell: InteractiveShell) -> None:
    result_checks.check_updates_in_place(notebook_shell, "")


def test_unpicklable_parts() -> None:
    result_checks.check_unpicklable_parts()


def test_results_of_a_failed_gang() -> None:
    result_checks.check_results_of_a_failed_gang()


def test_sharded_results() -> None:
    result_checks.check_sharded_results()


def test_sharded_results_that_cannot_be_gathered_are_refused() -> None:
    result_checks.check_refusals_of_sharded_results()


def test_fsdp1_is_refused_and_its_full_state_comes_home(notebook_shell: InteractiveShell) -> None:
    result_checks.check_fsdp1(notebook_shell, "")


def test_a_crash_while_packing_loses_nothing_that_was_packed(
    notebook_shell: InteractiveShell,
) -> None:
    result_checks.check_crash_while_packing(notebook_shell, "")


def test_a_rank_that_never_exits_does_not_hold_the_result() -> None:
    result_checks.check_that_it_ends_after_its_result()


def test_a_forked_child_sends_no_results() -> None:
    assert ended(hm.launch(result_ranks.forks, np=1)).result > 0


def test_an_optimizer_that_a_library_has_wrapped_is_refused() -> None:
    gang = ended(hm.launch(result_ranks.wrapped_optimizer, np=1))
    with pytest.raises(ResultError, match=r"has wrapped it for the ranks; .* `\.state_dict\(\)`"):
        _ = gang.result


def test_packing_a_result_may_take_longer_than_exiting() -> None:
    result_checks.check_slow_packing()


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
        assert len(closure_files()) == retries
        over.touch()
        assert ended(gang).results == [len(data)]
        assert closure_files() == []


def test_results_are_freed_with_the_notebooks_variables(
    notebook_shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_LARGE_BYTES", 1 << 20)
    run_cell(notebook_shell, "import numpy as np\nold = np.zeros(2 << 20, np.uint8)")
    run_cell(notebook_shell, "%%distributed --np 1 --quiet --out old\nold += 1")
    assert mapped_results() == [], "the array has got the new values"
    run_cell(notebook_shell, "%%distributed --np 1 --quiet --out new\nnew = old + 1")
    assert len(mapped_results()) == 1 and notebook_shell.user_ns["new"].sum() == 4 << 20
    run_cell(notebook_shell, "del new")
    ended(hm.launch(len, [], np=1))
    gc.collect()
    assert mapped_results() == []


def mapped_results() -> list[str]:
    """Return the results of ranks whose bytes this process holds."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "hydrogen_magic:result" in line]


def closure_files() -> list[str]:
    """Return the closures that this process holds open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing itself
            continue
    return [link for link in links if "hydrogen_magic:closure" in link]
