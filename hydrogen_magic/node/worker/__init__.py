"""Code that runs on a rank."""
