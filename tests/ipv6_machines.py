"""Two machines without IPv4 on their network, in namespaces as of :mod:`tests.spark_machines`.

It prints one line of JSON: where two ranks met, one on each machine, and what they gathered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hydrogen_magic.testing.entry_points import declare
from tests import directory_hosts, leaks, spark_machines, spark_ranks, spark_rig

KERNEL = "fd77::1"
MACHINES = {"one": "fd77::2", "two": "fd77::3"}


def main(folder: Path) -> None:
    leaks.mark_session()
    os.environ["HYDROGEN_MAGIC_HOME"] = str(folder / "home")
    spark_machines.prepare_network()
    for command in _only(KERNEL, spark_machines.BRIDGE):
        subprocess.run(command, check=True)
    for name, address in MACHINES.items():
        machine = spark_machines.Machine(name, "10.77.0.9")
        for command in _only(address, "eth0"):
            machine.run(*command)
        directory_hosts.PREFIXES[name] = machine.prefix
        (folder / "hosts" / name).mkdir(parents=True)
    entry_point = {"directories": "tests.directory_hosts:DirectoryPlacement"}
    declare(folder, "hydrogen_magic.placements", entry_point)
    sys.path.insert(0, str(folder))
    os.environ[directory_hosts.ROOT] = str(folder / "hosts")
    directory_hosts.ADDRESSES = []
    spark_rig.tell({"value": meeting()})


def _only(address: str, interface: str) -> list[list[str]]:
    """Return commands that give an interface this address and no other."""
    flush = ["ip", "address", "flush", "dev", interface]
    return [flush, ["ip", "address", "add", f"{address}/64", "nodad", "dev", interface]]


def meeting() -> object:
    import hydrogen_magic as hm

    return hm.launch(spark_ranks.meeting_place, np=2, on="directories").results


if __name__ == "__main__":
    main(Path(sys.argv[1]))
