"""Starts, watches and ends gangs, in the kernel."""
