"""Values and rules that every process shares: the job, its events, units. Standard library only."""
