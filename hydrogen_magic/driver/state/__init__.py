"""What a gang is: its state as a fold over events, and who is to blame when it fails."""
