"""Bytes to other processes: frames on a Unix socket, the encrypted channel, files in parts."""
