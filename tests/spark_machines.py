"""Machines of their own on one bridge, for tests: each has a network, processes, a name and, where asked
for, a control group to itself.

All of it is in namespaces that end with their first process, this module's, run by
:class:`MachineProcess`, so that nothing of it can reach, or stay in, the system that runs the tests. It is
the driver of a standalone cluster whose workers are on the machines. It reads names of scenes line by line,
plays them, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydrogen_magic.core import processes
from hydrogen_magic.driver.gang import Gang
from tests import horovod_ranks, jax_ranks, leaks, shards, spark_ranks
from tests import spark_rig as rig
from tests.gangs import alive, hosts_on_other_disks

KERNEL = "10.77.0.1"
OFFICE = "10.78.0.1"
"""This machine's address in another network, if there is one."""
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
BRIDGE = "hm-bridge"
AWAY_S = 180.0
"""Bound of every wait: a machine is given up after 45 s of silence."""
_HIERARCHIES = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
"""Of control groups: version 1's for memory, and version 2's only one."""
_GROUPS = "HYDROGEN_MAGIC_TEST_GROUPS"
"""Variable: the control group in which the machines' own are."""
_ENTER_GROUP = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


def why_not() -> str:
    """Return why there can be no such machines here, empty when there can."""
    for tool in ("unshare", "nsenter", "ip", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    # What a container may refuse: namespaces, mounts, links between namespaces.
    trial = "mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys && hostname t"
    command = [*UNSHARE, "--uts", "unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c"]
    command += [f"{trial} && ip link add t0 type veth peer name t1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class MachineProcess:
    """The process that has the machines in namespaces of its own, seen from outside."""

    def __init__(self, folder: Path, module: str, groups: Path | None = None) -> None:
        """Run ``module`` in a folder. ``groups``: of :func:`control_groups`."""
        self._log = folder / "log.txt"
        self._errors = self._log.open("wb")
        around = {} if groups is None else {_GROUPS: str(groups)}
        self._process = subprocess.Popen(
            [*UNSHARE, sys.executable, "-m", module, str(folder / "site")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd(), **around},
        )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(rig.ANSWER):
                answer = json.loads(line.removeprefix(rig.ANSWER))
                assert "error" not in answer, answer["error"]
                return answer["value"]
        raise AssertionError(f"it ended: {self._log.read_text()[-3000:]}")

    def play(self, scene: str) -> Any:
        assert self._process.stdin is not None
        print(scene, file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        self._process.kill()  # and with it the namespaces and all that runs in them
        self._process.communicate()
        self._errors.close()


@contextmanager
def control_groups() -> Iterator[Path | None]:
    """Give a control group for those of machines, which end before it; None if there can be none."""
    group = next(
        (Path(top, f"hydrogen-test-{os.getpid()}-machines") for top in _HIERARCHIES
         if os.access(Path(top, "cgroup.procs"), os.W_OK)), None,
    )  # fmt: skip
    try:
        if group is not None:
            group.mkdir()
    except OSError:
        group = None
    yield group
    if group is not None:
        for each in (*filter(Path.is_dir, group.iterdir()), group):
            rig.until(partial(_is_removed, each), AWAY_S)


def _is_removed(group: Path) -> bool:
    """Remove a group unless a process is left in it; return whether it is gone."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


# ── machines ─────────────────────────────────────────────────────────────────────────────────────


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def prepare_network() -> None:
    """Make the kernel's own machine: loopback and the bridge that the others hang on."""
    _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    _run("ip", "link", "set", "lo", "up")
    add_network(BRIDGE, KERNEL)


def add_network(bridge: str, address: str) -> None:
    """Make a network of 256 addresses, in which this machine has one."""
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "address", "add", f"{address}/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")


class Machine:
    """A host with a network, processes, a name and an address of its own; it shares the file system.

    With ``group`` all its processes are in a control group of that name, too.
    """

    def __init__(
        self, name: str, address: str, bridge: str = BRIDGE, *, group: str = "", n_gpus: int = 0
    ) -> None:
        self.name, self.address = name, address
        self._bridge, self._n_gpus = bridge, n_gpus
        self._group = _new_group(group) if group else None
        self._pid = self._start()
        self._port = f"hm-{self._pid}"
        peer = ("peer", "name", "eth0", "netns", str(self._pid))
        _run("ip", "link", "add", self._port, "type", "veth", *peer)
        self.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self.run("ip", "link", "set", link, "up")
        _run("ip", "link", "set", self._port, "up")
        self.mend()

    def _start(self) -> int:
        """Start the machine's first process, which takes in orphans; return its pid here."""
        first = (
            f"hostname {self.name} && mount -t sysfs sysfs /sys && echo up; sleep infinity; true"
        )
        unshare = [*UNSHARE, "--uts", "sh", "-c", first]
        started = subprocess.Popen([*self._entered, *unshare], stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        return next(p.pid for p in processes.processes() if p.ppid == started.pid)

    @property
    def _entered(self) -> tuple[str, ...]:
        return () if self._group is None else ("sh", "-c", _ENTER_GROUP, str(self._group))

    def run(self, *command: str) -> None:
        _run(*self.prefix, *command)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command that runs the rest of its arguments on this machine."""
        spaces = ("--net", "--uts", "--pid", "--mount")
        return (*self._entered, "nsenter", f"--target={self._pid}", *spaces, f"--wd={os.getcwd()}")

    @property
    def control_group(self) -> str:
        """``/proc/self/cgroup`` there."""
        return Path(f"/proc/{self._pid}/cgroup").read_text()

    @property
    def pid_space(self) -> str:
        """What ``/proc/self/ns/pid`` links to there."""
        return os.readlink(f"/proc/{self._pid}/ns/pid")

    def pids(self) -> dict[int, int]:
        """Return pid there -> pid here of what runs there besides the first process."""
        living = (process.pid for process in processes.processes() if not process.has_exited)
        there = (pid for pid in living if pid != self._pid and _pid_space(pid) == self.pid_space)
        return {_innermost(pid): pid for pid in there}

    def gang_pids(self) -> list[int]:
        """Return the pids here of agents there, and of what they started."""
        mark = f"{processes.AGENT}=".encode()
        return [pid for pid in self.pids().values() if mark in leaks.environment(pid)]

    def kill_gangs(self) -> int:
        """Kill them, agents before what they would report the end of; return how many there were."""
        pids = sorted(self.gang_pids())
        for pid in pids:
            processes.send_signal(pid, signal.SIGKILL)
        return len(pids)

    def cut(self) -> None:
        """Have the network lose every packet to and from it, and say so to nobody."""
        _run("ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        _run("ip", "link", "set", self._port, "master", self._bridge)

    @property
    def place(self) -> rig.Place:
        return rig.Place(self.address, self.prefix, self._n_gpus)


def _new_group(name: str) -> Path:
    group = Path(os.environ[_GROUPS], name)
    group.mkdir()
    return group


def _pid_space(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _innermost(pid: int) -> int:
    """Return the pid of a process in its own namespace; -1 if it is gone."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("NSpid:")[2].partition("\n")[0].split()[-1])
    return -1


# ── a cluster on them ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Stage:
    """What scenes are played on."""

    machines: Sequence[Machine]
    site: rig.Site
    cluster: rig.Standalone
    spark: Any

    def wait_for_slots(self) -> None:
        """Wait until the cluster runs two plain tasks on each machine."""
        n_slots = 2 * len(self.machines)
        rig.until(lambda: len(rig.process_ids(self.spark, n_slots)) == n_slots, AWAY_S)

    def gang_pids(self) -> set[int]:
        """Return the pids here of all machines' agents, and of what they started."""
        return {pid for machine in self.machines for pid in machine.gang_pids()}

    def family_of(self, gang: Gang) -> list[int]:
        """Return the pids, as seen from here, of all ranks and of their descendants."""
        known = {machine.name: machine.pids() for machine in self.machines}
        ranks = [known[rank.host][rank.pid] for rank in gang.ranks if rank.pid is not None]
        return [*ranks, *(child.pid for pid in ranks for child in processes.descendants(pid))]


@contextmanager
def stage(folder: Path, machines: Sequence[Machine]) -> Iterator[Stage]:
    """Give a cluster on the machines and this process's session on it, with two slots of each."""
    site = rig.Site.create(folder, KERNEL)
    cluster = rig.Standalone(site, [machine.place for machine in machines])
    size = {"spark.cores.max": str(2 * len(machines))}
    with rig.session(site, cluster.url, n_executors=len(machines), **size) as spark:
        yield Stage(machines, site, cluster, spark)


Scenes = Mapping[str, Callable[[Stage], Any]]


def play(folder: Path, machines: Sequence[Machine], scenes: Scenes) -> None:
    """Play the scenes whose names arrive, on the machines."""
    leaks.mark_session()
    os.environ["HYDROGEN_MAGIC_HOME"] = str(folder / "home")
    with stage(folder, machines) as stage_:
        rig.tell({"value": "ready"})
        for line in sys.stdin:
            try:
                answer = {"value": scenes[line.strip()](stage_)}
            except Exception:  # of a scene: the test that asked for it shows this
                answer = {"error": traceback.format_exc()}
            rig.tell(answer)


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────


def _running(n_steps: int) -> Any:
    """Start a gang that counts, and return it once all its ranks do."""
    import hydrogen_magic as hm

    gang = hm.launch(spark_ranks.count, n_steps, np=4, on="spark")
    rig.until(lambda: all("step 5" in text for text in gang.logs.values()) and gang.ranks, AWAY_S)
    return gang


def away_for_a_while(stage: Stage) -> Any:
    """Cut one machine off for five seconds; say how its gang ended and what came of the output."""
    gang = _running(80)
    stage.machines[1].cut()
    time.sleep(5.0)  # that long is the machine away
    stage.machines[1].mend()
    gang.wait(AWAY_S)
    whole = [f"step {step}" for step in range(80)]
    lost = [rank for rank, text in gang.logs.items() if _steps(text) != whole]
    return {"state": gang.state, "lost": lost}


def _steps(text: str) -> list[str]:
    """Return what :func:`tests.spark_ranks.count` printed; gloo has a word of its own."""
    return [line for line in text.splitlines() if line.startswith("step")]


def away_for_ever(stage: Stage) -> Any:
    """Cut one machine off for good; say how long its ranks lived, on this side and on that."""
    gang = _running(100_000)
    family = stage.family_of(gang)
    stage.machines[1].cut()
    begun = time.monotonic()
    ended_s: list[float] = []

    def wait() -> None:
        if gang.wait(AWAY_S):
            ended_s.append(time.monotonic() - begun)

    waiter = threading.Thread(target=wait)
    waiter.start()
    gone_s = None
    while gone_s is None and time.monotonic() - begun < AWAY_S:
        if not alive(family):
            gone_s = time.monotonic() - begun
        time.sleep(0.05)
    waiter.join()
    stage.machines[1].mend()
    snapshot = gang.snapshot()
    return {
        "n_processes": len(family),
        "ended_after_s": ended_s[0] if ended_s else None,
        "gone_after_s": gone_s,
        "state": gang.state,
        "reason": snapshot.reason,
        "culprit_host": None if snapshot.culprit is None else snapshot.ranks[snapshot.culprit].host,
    }


def again(stage: Stage) -> Any:
    """After whatever came before: say what two ranks on the one machine that stayed return."""
    import hydrogen_magic as hm

    stage.wait_for_slots()
    return hm.run(spark_ranks.count, 2, np=2, on="spark")


def carried(stage: Stage) -> Any:
    """Say what four ranks go on from, on machines that seem to share no disk with the kernel."""
    import hydrogen_magic as hm

    with hosts_on_other_disks():
        return hm.launch(spark_ranks.go_on, np=4, on="spark", retries=1).results


def sent_data(stage: Stage) -> Any:
    """Say which rows four ranks read, and from how many folders, on machines that share no disk."""
    import hydrogen_magic as hm

    with hosts_on_other_disks(), hm.dataset(stage.spark.range(1000).toDF("x")) as rows:
        found = hm.launch(shards.read_here, rows, np=4, on="spark").results
    return {
        "is_complete": shards.are_all_numbers(found, 1000),
        "folders": len({folder for _, _, folder in found}),
    }


def by_horovod(stage: Stage) -> Any:
    """Say who three ranks are to Horovod on two machines, and what an allreduce among them gave."""
    import hydrogen_magic as hm

    return hm.launch(horovod_ranks.places, np=3, on="spark", rendezvous="horovod").results


def by_jax(stage: Stage) -> Any:
    """Return the machines of four ranks, as each rank sees them by JAX."""
    import hydrogen_magic as hm

    return hm.launch(jax_ranks.hosts, np=4, on="spark", rendezvous="jax").results


def committed(stage: Stage) -> Any:
    """Say what elastic training on two machines that share no disk goes on from."""
    import hydrogen_magic as hm

    with hosts_on_other_disks():
        options = {"np": 4, "on": "spark", "rendezvous": "horovod", "retries": 1}
        return hm.launch(horovod_ranks.elastic, 6, "raise", 3, **options).results


def visited(stage: Stage) -> Any:
    """Say what :mod:`tests.spark_elsewhere` saw, and how many processes of gang and relay ended after it.

    It is on a network of its own: it reaches Spark Connect's server, and no executor reaches it.

        notebook 10.78.0.2 ── 10.78.0.1 server 10.77.0.1 ── 10.77.0.2 and 10.77.0.3 executors

    The server's machine forwards nothing from one network to the other.
    """
    add_network("hm-office", OFFICE)
    notebook = Machine("notebook", "10.78.0.2", "hm-office")
    options = {"spark.connect.grpc.binding.address": OFFICE}
    server = rig.ConnectServer(stage.site, stage.cluster.url, **options)
    with closing(server):
        n_executors = 2 * len(stage.machines)
        rig.until(lambda: len(stage.cluster.executors()) == n_executors, AWAY_S)
        others = stage.gang_pids()
        process = subprocess.Popen(
            [*notebook.prefix, sys.executable, "-m", "tests.spark_elsewhere",
             f"sc://{OFFICE}:{server.url.rpartition(':')[2]}"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith(rig.ANSWER))
        told: dict[str, Any] = json.loads(next(lines).removeprefix(rig.ANSWER))
        family, relays = stage.gang_pids() - others, _relays(server)
        for pid in notebook.pids().values():
            processes.send_signal(pid, signal.SIGKILL)
        process.communicate()
        rig.until(lambda: not alive([*family, *relays]), AWAY_S)
    return {**told, "n_processes": len(family), "n_relays": len(relays)}


def _relays(server: rig.ConnectServer) -> list[int]:
    mine = leaks.marked(leaks.LENT, server.mark)
    return [pid for pid in mine if "hydrogen_magic relay" in leaks.command(pid)]


SCENES: Scenes = {
    scene.__name__: scene
    for scene in (
        carried,
        sent_data,
        by_horovod,
        by_jax,
        committed,
        away_for_a_while,
        away_for_ever,
        again,
        visited,
    )
}


def main(folder: Path) -> None:
    prepare_network()
    play(folder, [Machine("one", "10.77.0.2"), Machine("two", "10.77.0.3")], SCENES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
