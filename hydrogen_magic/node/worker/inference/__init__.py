"""Ranks and Spark workers that predict after their cell has run."""
