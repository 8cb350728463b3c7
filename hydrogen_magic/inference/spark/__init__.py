"""``%%infer`` over Spark DataFrames: lazily by :mod:`.prepared`, or at once as a gang by :mod:`.gang`."""
