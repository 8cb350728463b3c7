"""What runs on machines with ranks. This package is sent to them whole, with those it imports."""
