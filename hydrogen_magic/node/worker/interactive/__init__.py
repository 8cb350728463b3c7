"""What a rank's code finds of a notebook: displays, input, IPython's shell and the debugger."""
