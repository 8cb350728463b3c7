"""Reports of a rank: its events are collected, and sent to its agent."""
