"""The arithmetic of a round: local steps, averaging, learning rates."""
