"""``MirroredStrategyRunner`` of ``spark_tensorflow_distributor``, based on gangs.

Signatures, defaults and return values are those of version 1.0.0; only the import changes::

    from hydrogen_magic.compat import MirroredStrategyRunner

    MirroredStrategyRunner(num_slots=8).run(train)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from hydrogen_magic.compat.options import GangOptions, own_names, positive
from hydrogen_magic.compat.spark_encryption import check_encryption, session_settings
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker.nesting import refuse_nested

_logger = logging.getLogger("MirroredStrategyRunner")
"""The original's name: notebooks may have set its level."""
_IGNORE_SSL = "tensorflow.spark.distributor.ignoreSsl"
_GPU = "gpu"
"""The only name of a GPU resource that placements on Spark ask for."""
_OWN_NAMES = {
    "--np": "`num_slots`",
    "--gpu": "`use_gpu=True` (the default)",
    "--on local": "`local_mode=True`",
    "--on spark": "`local_mode=False` (`local_mode=True` runs on this machine)",
}


class MirroredStrategyRunner:
    """Run a TensorFlow function on ``num_slots`` ranks: see the original for its usage.

    Intended differences:

    - Every slot is a rank: a process of its own, with one GPU. The original runs the function once for each
      Spark task, which may have several GPUs. The number of replicas is ``num_slots`` in both.
    - ``CUDA_VISIBLE_DEVICES`` lists the GPUs of all the gang's ranks on a host. TensorFlow uses the rank's
      own one alone; no GPU belongs to two ranks.
    - The kernel's environment stays as it is, and that of Spark's Python workers too.
    - ``local_mode=True`` runs ``num_slots`` ranks on this machine, not the function in the notebook's
      process. It needs neither Spark nor pyspark, and works with several slots without GPUs.
    - ``pyspark.BarrierTaskContext`` is not available in the function, whose rank is not Spark's worker.
    - Everything that the function uses from the notebook is sent with it, including imports and local
      modules.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = _GPU,
        use_custom_strategy: bool = False,
        env: Mapping[str, str] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        pack: bool | None = None,
    ) -> None:
        """Validate the arguments before anything runs.

        Args:
            num_slots: ranks, and with ``use_gpu`` also GPUs.
            local_mode: True: on this machine. False: on the executors of the notebook's Spark session.
            use_gpu: True: a GPU of its own for every rank. False: no rank sees one.
            gpu_resource_name: Spark's name of the resource; only "gpu" is supported.
            use_custom_strategy: True: the function creates its own strategy. False: it is called in the
                scope of a ``MultiWorkerMirroredStrategy``.
            env: environment variables of every rank.
            retries: how often to start all ranks again after a failure.
            timeout: seconds after which the ranks are stopped.
            start_timeout: seconds a rank may take until the function is called.
            pack: True: on as few hosts of a cluster as possible. False: on as many as possible.

        The last five are not in the original. Without a value, ``%config Distributed.*`` applies, as to all
        options that have no argument here.

        Raises:
            TypeError: ``num_slots`` is not a whole number, or an option has the wrong type.
            ValueError: ``num_slots`` is not positive, or an option has an impossible value.
            RuntimeError: there is no Spark session, or another ``gpu_resource_name`` is needed
                (PlacementError, both).
        """
        if not local_mode:
            refuse_nested()  # a rank on an executor lacks the modules that look at the session
        self._num_slots = positive("num_slots", num_slots)
        self._local_mode = local_mode
        self._use_gpu = use_gpu
        self._use_custom_strategy = use_custom_strategy
        self._options = GangOptions(env, retries, timeout, start_timeout, pack)
        if not local_mode:
            if use_gpu and gpu_resource_name != _GPU:
                raise PlacementError(
                    f"gpu_resource_name={gpu_resource_name!r} is not supported: configure the cluster's "
                    f"GPUs as the resource {_GPU!r}, or pass use_gpu=False"
                )
            with own_names(_OWN_NAMES):
                session_settings()

    def get_num_tasks(self) -> int:
        """Return the number of ranks."""
        return self._num_slots

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``train_fn(**kwargs)`` on every rank and return rank 0's value.

        Raises:
            TypeError: ``train_fn`` cannot be called.
            ValueError: this machine has fewer GPUs than ``local_mode`` needs.
            RuntimeError: a rank failed (RankFailedError), ranks cannot run as requested (PlacementError),
                an object that the function uses cannot be sent (CaptureError), or the ranks were
                stopped on request (GangStoppedError).
        """
        refuse_nested()
        from hydrogen_magic.compat import gangs

        if not callable(train_fn):
            raise TypeError(f"train_fn should be a function, got {train_fn!r}")
        spec = self._spec()
        launcher = type(self).__name__
        with own_names(_OWN_NAMES):
            if self._use_custom_strategy:
                return gangs.call(train_fn, (), kwargs, spec, caller=launcher)
            return gangs.call(call_in_scope, (train_fn, kwargs), {}, spec, caller=launcher)

    def _spec(self) -> JobSpec:
        if self._local_mode and self._use_gpu:
            _check_gpus(self._num_slots)
        elif not self._local_mode:
            with own_names(_OWN_NAMES):
                check_encryption(_IGNORE_SSL, _logger)
        return self._options.spec(
            np=self._num_slots,
            placement="local" if self._local_mode else "spark",
            rendezvous="tensorflow",
            gpu=bool(self._use_gpu),
        )


def call_in_scope(train_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``train_fn`` in the scope of a strategy for all ranks. Runs on ranks."""
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return train_fn(**kwargs)


def _check_gpus(num_slots: int) -> None:
    from hydrogen_magic.driver.placements import devices

    found = len(devices.visible_gpus(os.environ))
    if num_slots > found:
        raise ValueError(
            f"{num_slots} slots were requested for local training with GPUs, but only {found} GPUs "
            "are available; pass use_gpu=False to train on the CPU"
        )
