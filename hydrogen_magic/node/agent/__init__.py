"""The process beside the ranks of one host: starts them, watches them, reads their output, ends them.

``python -m hydrogen_magic.node.agent`` runs one; :mod:`hydrogen_magic.driver.placements` starts it. It is the
only one of a host that talks to the kernel, and nothing it started outlives it or the kernel.
"""
