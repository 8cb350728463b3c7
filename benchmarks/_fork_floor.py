"""The fork floor's server: reads ``{"np", "port"}`` lines, forks ranks that all_reduce once.

Ranks do what every other way's ranks do: join a group, all_reduce, leave it, return the sum.
Answers ``{"sum"}`` as soon as rank 0 is done, and ``{"exited"}`` when every rank has exited.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist


def answer(**fields: object) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def be_rank(rank: int, world_size: int, port: int) -> None:
    """One rank, from fork to exit."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    if rank == 0:
        answer(sum=ones.item())


def serve() -> None:
    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank in range(request["np"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    be_rank(rank, request["np"], request["port"])
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answer(exited=codes)


if __name__ == "__main__":
    serve()
