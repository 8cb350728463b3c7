"""``hm.dataset(frame)``: a frame of the notebook as Parquet data that ranks read."""
