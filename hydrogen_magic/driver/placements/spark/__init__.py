"""Ranks as barrier tasks of the notebook's Spark session; the same code for classic and Connect."""
