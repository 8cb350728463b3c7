"""``%%infer`` in the kernel: frames are cut, handed out and put together; Spark's stay with Spark."""
