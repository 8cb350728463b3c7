"""Ranks as barrier tasks of the notebook's Spark session: classic or Connect, the same code.

    kernel ── submit ──► Spark ── one barrier task per rank ──► finds or starts its host's agent
       ▲                                                                     │
       └────────────── wire: TCP, encrypted, agents connect ◄────────────────┘

A task holds its slot (and GPUs) and waits; ranks are forked by the agent, as on the notebook's own
machine. Agents are one per machine and stay warm between cells. Spark is never asked to exchange
anything between tasks (``barrier()`` costs a second each time), nor to restart a stage.
"""
