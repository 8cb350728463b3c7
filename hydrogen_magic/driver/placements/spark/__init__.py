"""Ranks as barrier tasks of the notebook's Spark session; the same code for classic and Connect.

    kernel ── submit ──► Spark ── one barrier task per rank ──► finds or starts its host's agent
       ▲                                                                     │
       └─────────── channel: TCP, encrypted, agents connect ◄────────────────┘

A task holds its slot (and GPUs) and waits; the agent forks the ranks, as on the notebook's own machine.
There is one agent per machine, which stays warm between cells. Spark is never used to exchange data between
tasks (``barrier()`` costs a second each time), nor to restart a stage.
"""
