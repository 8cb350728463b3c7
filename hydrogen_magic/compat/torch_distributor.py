"""``TorchDistributor`` of ``pyspark.ml.torch.distributor``, based on gangs.

Signatures, defaults, checks and return values are those of pyspark 4.3; only the import changes::

    from hydrogen_magic.compat import TorchDistributor

    model = TorchDistributor(num_processes=2, local_mode=False).run(train, 1e-3)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hydrogen_magic.compat.options import GangOptions, own_names, positive
from hydrogen_magic.compat.spark_encryption import check_encryption, session_settings
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker.nesting import refuse_nested

_logger = logging.getLogger("TorchDistributor")
"""The original's name: notebooks may have set its level."""


class TorchDistributor:
    """Run a function or a script on ``num_processes`` ranks: see the original for its usage.

    Intended differences:

    - A script that fails raises, as a function does: the error names the rank that failed first, its
      exception and its line. It is a RuntimeError, as the original's.
    - The kernel's environment stays as it is, and that of Spark's Python workers too.
    - ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` count the ranks of a host; the original calls every Spark
      task a node, whose local rank is 0. So in both modes a rank's own GPU is ``cuda:LOCAL_RANK``.
    - ``local_mode=True`` needs neither Spark nor pyspark. The GPUs are ``num_processes`` of those that CUDA
      may use in this process, first those that none of your other gangs on this machine uses;
      ``spark.driver.resource.gpu.*`` is ignored.
    - ``use_gpu=False`` hides GPUs from the ranks in local mode too.
    - ``local_mode=False`` gives every rank one GPU without ``spark.task.resource.gpu.amount`` where
      Spark can do that for a single job. Amounts above 1 are ignored: a rank has one GPU.
    - Everything that a function uses from the notebook is sent with it, including imports and local
      modules.

    Attributes ``num_processes``, ``local_mode``, ``use_gpu`` and ``ssl_conf`` are as in the original.
    """

    _own_names: ClassVar[Mapping[str, str]] = {
        "--np": "`num_processes`",
        "--gpu": "`use_gpu=True` (the default)",
        "--on local": "`local_mode=True`",
        "--on spark": "`local_mode=False` (`local_mode=True` runs on this machine)",
    }
    _TORCH_SSL_CONF = "pytorch.spark.distributor.ignoreSsl"

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str = _TORCH_SSL_CONF,
        *,
        env: Mapping[str, str] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        pack: bool | None = None,
    ) -> None:
        """Validate the arguments before anything runs.

        Args:
            num_processes: ranks; locally with ``use_gpu`` lowered, with a warning, to the GPUs there are.
            local_mode: True: on this machine. False: on the executors of the notebook's Spark session.
            use_gpu: True: a GPU of its own for every rank. False: no rank sees one.
            _ssl_conf: Spark setting that allows training on a cluster with ``spark.ssl.enabled``.
            env: environment variables of every rank.
            retries: how often to start all ranks again after a failure.
            timeout: seconds after which the ranks are stopped.
            start_timeout: seconds a rank may take until the function is called.
            pack: True: on as few hosts of a cluster as possible. False: on as many as possible.

        The last five are not in the original. Without a value, ``%config Distributed.*`` applies, as to all
        options that have no argument here.

        Raises:
            TypeError: ``num_processes`` is not a whole number, or an option has the wrong type.
            ValueError: ``num_processes`` is not positive, or an option has an impossible value.
            RuntimeError: no GPU was found here, or there is no Spark session (PlacementError, both).
        """
        if not local_mode:
            refuse_nested()  # a rank on an executor lacks the modules that look at the session
        self.num_processes = positive("num_processes", num_processes)
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self.ssl_conf = _ssl_conf
        self._options = GangOptions(env, retries, timeout, start_timeout, pack)
        with own_names(self._own_names):
            if not local_mode:
                session_settings()
            elif use_gpu:
                self.num_processes = _at_most_one_per_gpu(self.num_processes)

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any | None:
        """Call a function on every rank and return rank 0's value, or run a script and return None.

        Args:
            train_object: a function, or the path of a Python file.
            args: the function's, or the script's command line; other values are converted to text.
            kwargs: the function's; a script takes none.

        Raises:
            ValueError: keyword arguments for a script.
            TypeError: ``train_object`` is neither a path nor callable.
            RuntimeError: a rank failed (RankFailedError), ranks cannot run as requested (PlacementError),
                an object that the function uses cannot be sent (CaptureError), or the ranks were
                stopped on request (GangStoppedError).
        """
        refuse_nested()
        from hydrogen_magic.compat import gangs

        launcher = type(self).__name__
        if not isinstance(train_object, (str, os.PathLike)):
            with own_names(self._own_names):
                return gangs.call(train_object, args, kwargs, self._spec(), caller=launcher)
        path = os.fspath(train_object)
        if kwargs:
            raise ValueError(
                "Running pytorch file does not support key-word type arguments: got"
                f" {', '.join(kwargs)}; write them as text: run({path!r}, '--{next(iter(kwargs))}=…')"
            )
        with own_names(self._own_names):
            gangs.run_script(path, [*map(str, args)], self._spec(), caller=launcher)
        return None

    def _spec(self) -> JobSpec:
        """Return the spec; RuntimeError if the cluster requires something that ranks do not support."""
        if not self.local_mode:
            check_encryption(self.ssl_conf, _logger)
        placement = "local" if self.local_mode else "spark"
        gpu = bool(self.use_gpu)
        return self._options.spec(
            np=self.num_processes, placement=placement, rendezvous="torch", gpu=gpu
        )


def _at_most_one_per_gpu(num_processes: int) -> int:
    """Return how many ranks can have a GPU of this machine; warn if that is less than requested."""
    from hydrogen_magic.driver.placements import devices

    found = len(devices.visible_gpus(os.environ))
    if found == 0:
        raise PlacementError(
            "GPUs were unable to be found on the driver: use_gpu=True, the default, needs a GPU "
            "of this machine for every rank; pass use_gpu=False to train on the CPU"
        )
    if num_processes > found:
        _logger.warning(
            "'num_processes' cannot be set to a value greater than the number of available GPUs on "
            "the driver, which is %d. 'num_processes' was reset to be equal to the number of "
            "available GPUs.",
            found,
        )
    return min(num_processes, found)
