"""The agent, one process per host: it starts the ranks, watches them, reads their output, and ends them.

``python -m hydrogen_magic.node.agent`` runs an agent; :mod:`hydrogen_magic.driver.placements`
starts it. Only the agent of a host communicates with the kernel. None of its child processes
outlives the agent or the kernel.
"""
