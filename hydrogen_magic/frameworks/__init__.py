"""Rendezvous of other libraries: each package is a plug-in, which entry points name."""
