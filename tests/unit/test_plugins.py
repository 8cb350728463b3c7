"""Extension points: which names there are, what is said of those that cannot be used."""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from traitlets import TraitError

from hydrogen_magic import plugins
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.core.masking import secret_values
from hydrogen_magic.core.messages import ObserverSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.placements.remote import HostProvider, RemoteAgentGroup, packaging
from hydrogen_magic.driver.placements.remote.forwarded_settings import forwarded
from hydrogen_magic.driver.state.culprit import is_victim_error
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.notebook import doctor
from hydrogen_magic.notebook.arguments.distributed import parse, usage
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.notebook.magics import Distributed
from hydrogen_magic.testing.entry_points import declare
from hydrogen_magic.views.tables import plan_table
from tests import plug_in


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[None]:
    with plug_in.installed(tmp_path):
        yield


def test_names_are_those_of_entry_points_ours_first(installed: None) -> None:
    assert list(plugins.PLACEMENTS)[:3] == ["inline", "local", "spark"]
    assert set(plugins.PLACEMENTS) > {"mine", "ending"}
    assert list(plugins.RENDEZVOUS)[:4] == ["horovod", "jax", "tensorflow", "torch"]
    assert type(plugins.placement("mine")).__module__ == "my_plug_in"
    assert parse("--on mine --with mine", defaults=JobSpec()).spec.placement == "mine"
    assert "|mine" in usage()


def test_only_a_placement_that_says_so_outlives_the_kernel(installed: None) -> None:
    assert parse("--on mine --outlive").spec.outlive
    with pytest.raises(ArgumentsError, match="its ranks end with the kernel; keep the kernel"):
        parse("--on ending --outlive")


def test_config_takes_names_of_plug_ins(installed: None) -> None:
    magic = Distributed(None)  # type: ignore[arg-type]  # no shell is asked for anything here
    magic.on = "mine"
    with pytest.raises(TraitError, match=r"'local'.*'mine'"):
        magic.on = "nowhere"


def test_without_plug_ins_only_ours_are_there() -> None:
    assert list(plugins.RENDEZVOUS) == ["horovod", "jax", "tensorflow", "torch"]
    with pytest.raises(PlacementError, match="`--on mine`: no placement of this name is installed"):
        plugins.placement("mine")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", r"my_plug_in:Missing of my-placements 1\.0 cannot be loaded \(AttributeError"),
        (
            "wrong",
            r"is a int, not a placement; its class should derive from \S+\.plugins\.Placement",
        ),
        (
            "incomplete",
            r"my_plug_in:PlanningOnly of my-placements 1\.0 does not define open, which",
        ),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(installed: None, name: str, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason) as caught:
        plugins.placement(name)
    assert f"`--on {name}`" in str(caught.value)


def test_an_incomplete_rendezvous_is_refused_when_it_is_loaded(installed: None) -> None:
    with pytest.raises(PlacementError, match=r"Nobody of \S+ 1\.0 does not define prepare, "):
        plugins.rendezvous("incomplete")


def test_a_provider_of_hosts_without_a_method_is_named() -> None:
    with pytest.raises(
        PlacementError, match=r"HostProvider.*does not define acquire and release and"
    ):
        RemoteAgentGroup(HostProvider)


def test_a_broken_plug_in_is_no_obstacle_to_others(installed: None) -> None:
    names = {type(one).__name__ for one in plugins.every_rendezvous()}
    assert names == {
        f"{name}Rendezvous" for name in ("Torch", "Horovod", "Jax", "TensorFlow", "My", "Serving")
    }
    plugins.check(JobSpec(placement="mine", rendezvous="mine"))


def test_two_distributions_with_one_name_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for distribution in ("first-plug-in", "second-plug-in"):
        declare(tmp_path, "hydrogen_magic.rendezvous", {"mpi": "mpi:Mpi"}, distribution)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlacementError, match="both provide a rendezvous of this name") as caught:
        plugins.rendezvous("mpi")
    assert "first-plug-in 1.0" in str(caught.value)
    assert "second-plug-in 1.0" in str(caught.value)


def test_a_distribution_may_declare_points_of_several_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in ("hydrogen_magic.rendezvous", "hydrogen_magic.commands"):
        declare(tmp_path, group, {"mpi": "mpi:Mpi"})
    monkeypatch.syspath_prepend(tmp_path)
    found = [point.group for point in metadata.entry_points(value="mpi:Mpi")]
    assert sorted(found) == ["hydrogen_magic.commands", "hydrogen_magic.rendezvous"]


def test_old_metadata_of_this_package_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path, "console_scripts", {}, "hydrogen_magic")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(PlacementError, match=r"an older version.*pip install -e \.") as caught:
        plugins.placement("local")
    assert "'hydrogen_magic.placements'" in str(caught.value)


def test_several_observers_of_one_module_are_all_listed(installed: None) -> None:
    observers = plugins.observers()
    found = [one.function for one in observers if one.module == "watched_library"]
    assert sorted(found) == ["my_plug_in:attach", "no_such_module:attach"]
    assert ObserverSpec("tqdm.std", "hydrogen_magic.node.worker.observe.tqdm:attach") in observers


def test_what_a_rendezvous_says_is_heeded(installed: None) -> None:
    env = {"MY_STORE": "x", "MY_LEVEL": "open-sesame-please"}
    assert is_victim_error(ev.ErrorReport("my.MyPeerError", ""))
    assert is_victim_error(ev.ErrorReport("RuntimeError", "my peer 3 has gone"))
    assert forwarded(env) == (("MY_LEVEL", "open-sesame-please"),)
    assert secret_values({}, env, plugins.forwarded()) == ()
    with pytest.raises(ArgumentsError, match="env sets MY_STORE"):
        parse("--env MY_STORE=1", defaults=JobSpec())
    assert plugins.rendezvous("mine").launcher == "myrun -n {np}"


def test_other_machines_get_the_settings_of_libraries() -> None:
    settings = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else deterministic algorithms of the notebook fail there
        "GLOO_SOCKET_IFNAME": "eth1",
        "HOROVOD_TIMELINE": "/tmp/timeline.json",
        "KERAS_BACKEND": "torch",
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    others = {"KERAS_HOME": "/home", "RANK": "0", "TF_VAR_password": "of Terraform"}
    found = forwarded({**settings, **others})
    assert found == tuple(settings.items())
    shown = "\n".join(plan_table(Plan((), forwarded=(*found, ("JAX_KEY", "hf_Zq81-live-Qx9")))))
    assert all(re.search(rf"^{name} +{re.escape(value)}$", shown, re.M) for name, value in found)
    assert re.search(r"^JAX_KEY +\*\*\*$", shown, re.M)


def test_machines_with_ranks_are_sent_what_runs_there(installed: None) -> None:
    with zipfile.ZipFile(io.BytesIO(packaging.code())) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith("my_parts/")} == {
        "my_parts/__init__.py",
        "my_parts/on_ranks/__init__.py",
        "my_parts/on_ranks/service.py",
    }
    assert "hydrogen_magic/frameworks/horovod/node/key_value_server.py" in names
    assert "cloudpickle/__init__.py" in names
    assert not [name for name in names if "/driver/" in name or "rendezvous.py" in name]


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        ("torch", []),
        ("jax", ["keras", "jax", "jax.numpy", "flax.linen"]),
        ("tensorflow", ["keras", "tensorflow"]),
    ],
)
def test_modules_that_ranks_must_import_themselves_are_not_imported_before_they_are_forked(
    library: str, refused: list[str]
) -> None:
    """They start threads, or read variables of which each rank has its own."""
    modules = ("keras", "jax", "jax.numpy", "jaxtyping", "flax.linen", "numpy", "tensorflow")
    found = launcher._preload(plugins.rendezvous(library), modules)
    assert [name for name in modules if name not in found] == refused


def test_victims_of_a_rendezvous_are_not_those_of_others() -> None:
    assert not is_victim_error(ev.ErrorReport("my.MyPeerError", ""))


def test_the_doctor_asks_each_rendezvous(installed: None) -> None:
    found = doctor.library("horovod")
    assert found is not None and found.name == "Horovod"
    assert doctor.library("torch") is None
