"""Support of other libraries: each package is a plug-in, whose rendezvous and commands entry points name."""
