"""A cell's ``predict`` and the rows it is given: the same on a rank as on a Spark executor.

rows of a frame ── inputs ─► predict, called as it wants ── outputs ─► columns of one schema
"""
