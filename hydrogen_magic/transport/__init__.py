"""Bytes to another process: frames on a Unix socket, the encrypted channel, files in parts."""
