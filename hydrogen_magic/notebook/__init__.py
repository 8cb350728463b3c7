"""The notebook's side: magics, their arguments, IPython."""
