"""Horovod on machines with ranks: what observes it there, and what its ranks meet at."""
