"""Horovod, whose upstream has stopped: built for the torch that is installed, and looked after.

``python -m hydrogen_magic.horovod build`` builds and installs it, :mod:`.installed` says what there
is and whether it fits. How ranks meet under it is a rendezvous's to know.
"""
