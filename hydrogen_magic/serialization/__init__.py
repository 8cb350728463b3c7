"""Objects to bytes and back: the pickler, closures, results, and messages about what cannot travel."""
