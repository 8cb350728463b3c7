"""What a rank of a session keeps from cell to cell."""
