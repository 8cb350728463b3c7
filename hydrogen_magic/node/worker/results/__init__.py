"""Results of a rank: pickled, gathered from shards, and sent to the kernel."""
