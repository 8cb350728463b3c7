"""The state of a gang as a fold over events, and the culprit of a failure."""
