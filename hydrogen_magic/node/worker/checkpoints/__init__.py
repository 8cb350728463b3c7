"""Checkpoints of a rank."""
