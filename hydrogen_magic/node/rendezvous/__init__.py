"""Servers that run beside the ranks, for ranks to find each other."""
