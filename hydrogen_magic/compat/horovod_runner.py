"""``HorovodRunner`` of Databricks' ``sparkdl``, based on gangs.

Signatures, defaults and documented behaviour are those of sparkdl 2.2
(https://databricks.github.io/spark-deep-learning); only the import changes::

    from hydrogen_magic.compat import HorovodRunner

    model = HorovodRunner(np=2).run(train_hvd, learning_rate=0.001)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hydrogen_magic.compat.options import GangOptions, own_names, whole
from hydrogen_magic.node.worker.nesting import refuse_nested

_VERBOSITIES = ("all", "log_callback_only")
_OWN_NAMES = {
    "--np": "the absolute value of `np`",
    "--gpu": "`%config Distributed.gpu = True`",
    "--on local": "a negative `np`",
    "--on spark": "a positive `np` (a negative one runs on this machine)",
}


class HorovodRunner:
    """Run a function that uses Horovod on ``np`` ranks: see the original for its usage.

    Intended differences:

    - Everything that the function uses from the notebook is sent with it: imports, functions, data,
      local modules. The function needs no imports of its own.
    - A failure names the rank that failed first, its exception and its line.
    - More ranks than the cluster has slots are refused at once, with the numbers.
    - ``np=0``, "all slots", which the original no longer documents, is an error.
    - With ``"log_callback_only"``, the ranks' output is not lost: ``%gang logs`` has it, and a failure
      shows its last lines.

    Attribute ``num_processor`` is as in the original.
    """

    def __init__(
        self,
        np: int,
        *,
        driver_log_verbosity: str = "log_callback_only",
        env: Mapping[str, str] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        pack: bool | None = None,
    ) -> None:
        """Validate the arguments before anything runs.

        Args:
            np: positive: as many barrier tasks of the notebook's Spark session, one rank each; a
                rank has a GPU of its own where every slot has one. Negative: ``-np`` ranks on this
                machine.
            driver_log_verbosity: with ``"all"``, all output of ranks on Spark is shown; with
                ``"log_callback_only"`` only messages of ``log_to_driver`` and ``LogCallback``.
                The output of ranks on this machine is always shown.
            env: environment variables of every rank.
            retries: how often to start all ranks again after a failure.
            timeout: seconds after which the ranks are stopped.
            start_timeout: seconds a rank may take until the function is called.
            pack: True: on as few hosts of a cluster as possible. False: on as many as possible.

        The last five are not in the original. Without a value, ``%config Distributed.*`` applies, as to all
        options that have no argument here.

        Raises:
            TypeError: ``np`` is not a whole number, or an option has the wrong type.
            ValueError: ``np`` is 0, or an option has an impossible value.
        """
        self.num_processor = _not_zero(np)
        if driver_log_verbosity not in _VERBOSITIES:
            raise ValueError(
                f"driver_log_verbosity should be {' or '.join(map(repr, _VERBOSITIES))}, got"
                f" {driver_log_verbosity!r}"
            )
        self._driver_log_only = driver_log_verbosity == "log_callback_only"
        self._options = GangOptions(env, retries, timeout, start_timeout, pack)

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on every rank and return rank 0's value.

        On Spark, it waits until that many slots are free.

        Raises:
            TypeError: ``main`` cannot be called.
            RuntimeError: a rank failed (RankFailedError), ranks cannot run as requested (PlacementError),
                an object that the function uses cannot be sent (CaptureError), or the ranks were
                stopped on request (GangStoppedError).
        """
        refuse_nested()
        from hydrogen_magic.compat import gangs

        is_on_spark = self.num_processor > 0
        spec = self._options.spec(
            np=abs(self.num_processor),
            placement="spark" if is_on_spark else "local",
            rendezvous="horovod",
        )
        driver_log_only = is_on_spark and self._driver_log_only
        launcher = type(self).__name__
        with own_names(_OWN_NAMES):
            return gangs.call(
                main, (), kwargs, spec, caller=launcher, driver_log_only=driver_log_only
            )


def _not_zero(np: int) -> int:
    """Return ``np``, which may be of any integer type, as an int."""
    number = whole("np", np)
    if number == 0:
        raise ValueError(
            "np=0 (all task slots of the cluster) is not supported; HorovodRunner no longer "
            "documents it, since the number of slots changes with the executors. Give the number "
            "of ranks, or -1 for one rank on this machine"
        )
    return number
