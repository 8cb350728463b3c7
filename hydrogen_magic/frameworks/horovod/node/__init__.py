"""Horovod on machines with ranks: its observers and its rendezvous server."""

from __future__ import annotations

TIMELINE = "HOROVOD_TIMELINE"
"""Variable with the path to which Horovod's rank 0 writes its timeline."""
DYNAMIC = "DYNAMIC"
"""Its value where a timeline may begin later."""
