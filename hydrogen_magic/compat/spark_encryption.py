"""The refusal of clusters with TLS, as the originals have it: ranks communicate without encryption."""

from __future__ import annotations

import logging
from typing import Any

from hydrogen_magic.errors import PlacementError


def check_encryption(override: str, logger: logging.Logger) -> None:
    """Raise PlacementError on a cluster with TLS, unless its setting ``override`` is true."""
    settings = session_settings()
    if not _is_true(settings, "spark.ssl.enabled"):
        return
    what = (
        "this cluster has TLS enabled (spark.ssl.enabled). Code, output and results are sent "
        "encrypted, but the traffic between ranks (gradients, parameters, possibly data) is "
        "not"
    )
    if not _is_true(settings, override):
        raise PlacementError(f"{what}: set {override} to true to train anyway")
    logger.warning("%s; %s allows it", what, override)


def session_settings() -> Any:
    """Return the ``spark.conf`` of the notebook's session; PlacementError if there is none."""
    from hydrogen_magic.driver.placements.spark import spark_session

    return spark_session.find().spark.conf


def _is_true(settings: Any, key: str) -> bool:
    return str(settings.get(key, "false")).lower() == "true"
