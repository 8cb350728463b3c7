"""What tests of endings run on ranks, without torch. A plain local module: it travels whole."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import time
from pathlib import Path


def die(how: str) -> None:
    os.kill(os.getpid(), getattr(signal, how))


def reach_cpu_limit(hard_s: int) -> None:
    """Reach the limit of one second; ``hard_s``: the hard one."""
    resource.setrlimit(resource.RLIMIT_CPU, (1, hard_s))
    while True:
        pass


def leave_slowly(*files: str) -> None:
    """Hang in an exit handler, which seems to be of the rank's file of a library if that is not empty."""

    def hang() -> None:
        print("leaving", flush=True)
        time.sleep(1000)

    if file := files[int(os.environ["RANK"])]:
        hang.__code__ = hang.__code__.replace(co_filename=file)
    atexit.register(hang)


def tee() -> int:
    """Print to a stream of the user's, which has no ``flush``, or on rank 1 one that fails."""

    class Tee:
        def write(self, text: str) -> None:
            sys.__stdout__.write(text)

    class Failing(Tee):
        def flush(self) -> None:
            raise RuntimeError("the other file is closed")

    sys.stdout = Failing() if os.environ["RANK"] == "1" else Tee()  # type: ignore[assignment]
    print("hello")
    return 4


def signals() -> tuple[set[int], object]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD)


def fork_three() -> tuple[int, int]:
    """Return the exit codes of a child that exits and of one that raises, after a point was logged.

    A third one returns, too.
    """
    import hydrogen_magic as hm

    hm.log(0, loss=1.0)
    if (leaving := os.fork()) == 0:
        sys.exit(7)
    if (failing := os.fork()) == 0:
        raise ValueError("of a child")
    if (returning := os.fork()) == 0:
        return -1, -1
    os.waitpid(returning, 0)
    first, second = (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (leaving, failing))
    return first, second


def eat(tasks: str) -> None:
    """Have rank 1 take memory in the control group whose file is ``tasks``."""
    if os.environ["RANK"] == "1":
        with open(tasks, "w") as file:
            file.write(str(os.getpid()))
        eaten = [bytearray(10 << 20) for _ in range(100)]
        print(len(eaten))
    time.sleep(60)


def save_at_interrupt() -> None:
    def save(signum: int, frame: object) -> None:
        print("saving", flush=True)
        time.sleep(1)
        print("saved")
        sys.exit()

    ours = signal.signal(signal.SIGINT, save)
    assert signal.getsignal(signal.SIGINT) is save
    assert signal.signal(signal.SIGINT, ours) is save
    assert signal.signal(signal.SIGINT, save) is ours
    print("ready", flush=True)
    time.sleep(1000)


def fail_first() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ConnectionError("the first attempt is over")


def return_later() -> str:
    """Hang in the first attempt; return the number of the second."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print("about to hang", flush=True)
        time.sleep(1000)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def look() -> tuple[str, str | None, bool]:
    """Return where this rank is, in the second attempt; the first one fails once there is a file ``go``."""
    found = os.getcwd(), os.environ.get("MODE"), "/added/later" in sys.path
    if not Path("again").exists():
        Path("again").touch()
        print("first", flush=True)
        while not Path("go").exists():
            time.sleep(0.01)
        raise ValueError(f"{found}")
    return found
