"""Gangs that outlive their kernel: a process of their own, the owner, launches and controls them.

kernel                                    owner                            host
──────                                    ─────                            ────
launch ── OwnGang, closure ─────────────► process ── launcher ── hub ════ agent ── ranks
connection ── Attach, AskGang, … ───────► server ──► Gang
     Gang ◄── Attached, OwnerEvents ─────             └──► record on disk, results included

The first connection is a socket that the owner inherits. Later ones, of this or another kernel or of a
terminal, use a Unix socket in the private directory of the run.
"""
