"""Code for machines with ranks. This package is sent to them completely, with the packages it imports."""
