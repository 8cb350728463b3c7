"""A cell's ``predict`` and its input rows: the same code on a rank and on a Spark executor.

rows of a frame ── inputs ─► predict, called as it wants ── outputs ─► columns of one schema
"""
