"""``%%infer`` over Spark DataFrames."""
