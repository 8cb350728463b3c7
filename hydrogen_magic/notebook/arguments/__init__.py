"""Parses the lines of magics into frozen values, independently of IPython and of their use."""
