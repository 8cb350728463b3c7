"""Code that runs on a rank: the process in these files, the parts of its work in the folders."""
