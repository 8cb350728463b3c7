"""``DeepspeedTorchDistributor`` of ``pyspark.ml.deepspeed``, based on gangs.

Signatures, defaults and return values are those of pyspark 4.3; only the import changes::

    from hydrogen_magic.compat import DeepspeedTorchDistributor

    config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2}}
    DeepspeedTorchDistributor(numGpus=4, nnodes=2, localMode=False, deepspeedConfig=config).run("train.py")
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hydrogen_magic.compat.torch_distributor import TorchDistributor


class DeepspeedTorchDistributor(TorchDistributor):
    """Run a function or a script that calls ``deepspeed.initialize``: see the original for its usage.

    The differences are those of :class:`TorchDistributor`, and these:

    - A configuration that is a dict is passed to a script as base64 text, which DeepSpeed decodes; the
      original writes a temporary file, which stays. On Spark a file of this machine is passed in the
      same way, so the executors need not have it.
    - ``numGpus`` times ``nnodes`` is the number of ranks. On Spark they are not tied to that many hosts:
      ``pack`` chooses few or many of them.

    Attributes are those of :class:`TorchDistributor`, and ``deepspeed_config``.
    """

    _DEEPSPEED_SSL_CONF = "deepspeed.spark.distributor.ignoreSsl"
    _own_names: ClassVar[Mapping[str, str]] = {
        "--np": "`numGpus*nnodes`",
        "--gpu": "`useGpu=True` (the default)",
        "--on local": "`localMode=True`",
        "--on spark": "`localMode=False` (`localMode=True` runs on this machine)",
        "use_gpu": "`useGpu`",
    }

    def __init__(
        self,
        numGpus: int = 1,
        nnodes: int = 1,
        localMode: bool = True,
        useGpu: bool = True,
        deepspeedConfig: str | dict[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        retries: int | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        pack: bool | None = None,
    ) -> None:
        """Validate the arguments before anything runs.

        Args:
            numGpus: ranks on each node; locally with ``useGpu``, the GPUs of this machine limit them.
            nnodes: number of nodes.
            localMode: True: on this machine. False: on the executors of the notebook's Spark session.
            useGpu: True: a GPU of its own for every rank. False: no rank sees one.
            deepspeedConfig: DeepSpeed's configuration for a script: a dict, or the path of a JSON file. A
                function passes its own to ``deepspeed.initialize``. None: DeepSpeed's defaults.
            env: see :class:`TorchDistributor`, as for all that follow.
            retries: how often to start all ranks again after a failure.
            timeout: seconds after which the ranks are stopped.
            start_timeout: seconds a rank may take until the function is called.
            pack: True: on as few hosts of a cluster as possible. False: on as many as possible.

        Raises:
            TypeError: the configuration has values that JSON lacks; see also :class:`TorchDistributor`.
            ValueError: see :class:`TorchDistributor`.
            RuntimeError: see :class:`TorchDistributor`.
        """
        super().__init__(
            numGpus * nnodes,
            localMode,
            useGpu,
            self._DEEPSPEED_SSL_CONF,
            env=env,
            retries=retries,
            timeout=timeout,
            start_timeout=start_timeout,
            pack=pack,
        )
        self.deepspeed_config = deepspeedConfig
        self._config_argument()  # raises TypeError

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any | None:
        """Call a function on every rank and return rank 0's value, or run a script and return None.

        A script's command line ends with ``--deepspeed``, and ``--deepspeed_config`` if there is one.
        Raises the same errors as :meth:`TorchDistributor.run`.
        """
        if isinstance(train_object, (str, os.PathLike)):
            config = self._config_argument()
            args = (*args, "--deepspeed", *(("--deepspeed_config", config) if config else ()))
        return super().run(train_object, *args, **kwargs)

    def _config_argument(self) -> str:
        """Return ``--deepspeed_config`` as it is now: the user may have edited the file, or the dict."""
        return _argument(self.deepspeed_config, has_files=self.local_mode)


def _argument(config: str | dict[str, Any] | None, *, has_files: bool) -> str:
    """Return the value of ``--deepspeed_config``; ``has_files``: whether ranks can read this machine's."""
    if isinstance(config, dict):
        return _encoded(json.dumps(config))
    if not config:
        return ""
    file = Path(config)
    return str(config) if has_files or not file.is_file() else _encoded(file.read_text())


def _encoded(text: str) -> str:
    """Encode a configuration as ``deepspeed.runtime.config.DeepSpeedConfig`` decodes it."""
    return base64.urlsafe_b64encode(text.encode()).decode()
