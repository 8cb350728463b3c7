"""The notebook's side: magics, their arguments, and access to IPython."""
