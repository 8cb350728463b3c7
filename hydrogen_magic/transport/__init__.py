"""Bytes to other processes: frames on a Unix socket, the encrypted channel, files in parts.

``daemon_thread`` runs calls that would block the kernel's event loop.
"""
