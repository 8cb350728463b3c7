"""Tests of hydrogen_magic."""
