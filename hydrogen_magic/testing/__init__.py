"""What authors of plug-ins test them with. Needs pytest.

``contract``: ``GangContract``, what holds for every gang; a subclass runs it with your plug-in.
``SessionContract`` runs it for the cells of a session.
``ranks``: what ranks of the contract run, and ``Library``, how they use the library of a rendezvous.
``entry_points``: ``declare``, entry points of a plug-in that is not installed.
"""
