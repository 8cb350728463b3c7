"""Two machines with addresses of their own, for tests: network namespaces on one bridge.

All of it is in namespaces that end with their first process, this module's, run by

    unshare --net --mount --pid --fork --mount-proc --kill-child python -m tests.spark_machines FOLDER

so that nothing of it can reach, or stay in, the system that runs the tests. It is the driver of a
standalone cluster whose workers are on the two machines. It reads names of scenes line by line, plays
them, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import horovod_ranks, leaks, spark_ranks
from tests import spark_rig as rig
from tests.gangs import alive, family_of

KERNEL = "10.77.0.1"
ANSWER = "answer: "
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
BRIDGE = "hm-bridge"
AWAY_S = 180.0
"""Bound of every wait: a machine is given up after 45 s of silence."""


def why_not() -> str:
    """Return why there can be no such machines here, empty when there can."""
    for tool in ("unshare", "ip", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    # What a container may refuse: namespaces, mounts, links between namespaces.
    trial = "mount -t tmpfs tmpfs /run && mkdir /run/netns && ip netns add t && hostname t"
    command = [
        *UNSHARE,
        "--uts",
        "sh",
        "-c",
        f"{trial} && ip link add name t0 type veth peer name t1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"no network namespaces: {done.stderr.strip()}" if done.returncode else ""


# ── machines ─────────────────────────────────────────────────────────────────────────────────────


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def prepare_network() -> None:
    """Make the kernel's own machine: loopback and the bridge that the others hang on."""
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    Path("/run/netns").mkdir()
    _run("ip", "link", "set", "lo", "up")
    add_network(BRIDGE, KERNEL)


def add_network(bridge: str, address: str) -> None:
    """Make a network of 256 addresses, in which this machine has one."""
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "address", "add", f"{address}/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")


class Machine:
    """A host with a network, a name and an address of its own; it shares the file system."""

    def __init__(self, name: str, address: str, bridge: str = BRIDGE) -> None:
        self.name, self.address = name, address
        self._bridge = bridge
        self._port = f"hm-{name}"
        _run("ip", "netns", "add", name)
        peer = ("peer", "name", "eth0", "netns", name)
        _run("ip", "link", "add", self._port, "type", "veth", *peer)
        self.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self.run("ip", "link", "set", link, "up")
        _run("ip", "link", "set", self._port, "up")
        self.mend()

    def run(self, *command: str) -> None:
        _run(*self.prefix, *command)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command that runs the rest of its arguments on this machine."""
        inside = f'hostname {self.name} && exec "$@"'
        return ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", inside, "sh")

    def cut(self) -> None:
        """Have the network lose every packet to and from it, and say so to nobody."""
        _run("ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        _run("ip", "link", "set", self._port, "master", self._bridge)

    @property
    def place(self) -> rig.Place:
        return rig.Place(self.address, self.prefix)


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """Give the two machines, a cluster on them and this process's session on it."""
    prepare_network()
    machines = (Machine("one", "10.77.0.2"), Machine("two", "10.77.0.3"))
    site = rig.Site.create(folder, KERNEL)
    cluster = rig.Standalone(site, [machine.place for machine in machines])
    with rig.session(site, cluster.url) as spark:
        yield Stage(spark, machines)


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────


class Stage:
    """What scenes are played on."""

    def __init__(self, spark: Any, machines: tuple[Machine, Machine]) -> None:
        self.spark = spark
        self.machines = machines

    def wait_for_slots(self) -> None:
        """Wait until the cluster runs four plain tasks on both machines."""

        def both() -> bool:
            return len(rig.process_ids(self.spark, 4)) == 4

        rig.until(both, AWAY_S)


def who(stage: Stage) -> Any:
    """Return what each of four ranks says of where it is, after an all_reduce among them."""
    import hydrogen_magic as hm

    return hm.run(spark_ranks.where, np=4, on="spark")


def passed_on(stage: Stage) -> Any:
    """Say how often the bytes of a large closure leave the kernel, and whether all ranks have them."""
    import hydrogen_magic as hm
    from hydrogen_magic.core.messages import FilePart
    from hydrogen_magic.transport.channel import Hub

    data, sent, send = os.urandom(20_000_000), [0], Hub.send

    def counting(hub: Hub, key: str, message: Any, blob: Any = None) -> None:
        sent[0] += len(blob) if isinstance(message, FilePart) else 0
        send(hub, key, message, blob)

    Hub.send = counting  # type: ignore[method-assign]
    try:
        digests = set(hm.launch(spark_ranks.digest, data, np=4, on="spark").results)
    finally:
        Hub.send = send  # type: ignore[method-assign]
    return {"times": sent[0] / len(data), "whole": digests == {spark_ranks.digest(data)}}


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
    family = family_of(gang)
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


@contextmanager
def _on_other_disks() -> Iterator[None]:
    """Have machines seem to share no disk with the kernel."""
    from hydrogen_magic.driver.placements.remote import rank_assignment

    known = rank_assignment.plan

    def on_other_disks(*arguments: Any) -> rank_assignment.RankAssignment:
        return replace(known(*arguments), shares_disk=False)

    rank_assignment.plan = on_other_disks
    try:
        yield
    finally:
        rank_assignment.plan = known


def carried(stage: Stage) -> Any:
    """Say what four ranks go on from, on machines that seem to share no disk with the kernel."""
    import hydrogen_magic as hm

    with _on_other_disks():
        return hm.launch(spark_ranks.go_on, np=4, on="spark", retries=1).results


def by_horovod(stage: Stage) -> Any:
    """Say who three ranks are to Horovod on two machines, and what an allreduce among them gave."""
    import hydrogen_magic as hm

    return hm.launch(horovod_ranks.places, np=3, on="spark", rendezvous="horovod").results


def committed(stage: Stage) -> Any:
    """Say what elastic training on two machines that share no disk goes on from."""
    import hydrogen_magic as hm

    with _on_other_disks():
        options = {"np": 4, "on": "spark", "rendezvous": "horovod", "retries": 1}
        return hm.launch(horovod_ranks.elastic, 6, "raise", 3, **options).results


def links(stage: Stage) -> Any:
    """Say how many machines run Python workers, and whether a cut machine is out of reach."""
    import socket

    def reaches(machine: Machine) -> bool:
        """True when it answers, were it by a refusal."""
        try:
            socket.create_connection((machine.address, 9), timeout=1.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    stage.machines[1].cut()
    while_cut = [reaches(machine) for machine in stage.machines]
    stage.machines[1].mend()
    return {"while_cut": while_cut, "after": [reaches(machine) for machine in stage.machines]}


SCENES: dict[str, Callable[[Stage], Any]] = {
    scene.__name__: scene
    for scene in (
        who,
        passed_on,
        carried,
        by_horovod,
        committed,
        away_for_a_while,
        away_for_ever,
        again,
        links,
    )
}


def main(folder: Path) -> None:
    leaks.mark_session()
    os.environ["HYDROGEN_MAGIC_HOME"] = str(folder / "home")
    with stage(folder) as stage_:
        print(f"{ANSWER}{json.dumps({'value': 'ready'})}", flush=True)
        for line in sys.stdin:
            try:
                answer = {"value": SCENES[line.strip()](stage_)}
            except Exception:  # of a scene: the test that asked for it shows this
                answer = {"error": traceback.format_exc()}
            print(f"{ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
