"""What starts, watches and ends gangs in the kernel."""
