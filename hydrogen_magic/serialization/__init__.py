"""Objects to bytes and back: the pickler, closures, results, and messages about unpicklable objects."""
