"""Horovod support: builds it for the installed torch, and maintains it in place of upstream.

``python -m hydrogen_magic horovod build`` builds and installs it, and :mod:`.installation` checks the
installed version. :mod:`.rendezvous` is its rendezvous.
"""
