"""Horovod on machines with ranks: its observers and its rendezvous server."""
