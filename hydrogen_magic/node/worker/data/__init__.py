"""The data path of a rank: its share of common data, in batches."""
