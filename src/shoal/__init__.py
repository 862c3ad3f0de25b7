"""shoal: elastic data-parallel training on MPI ranks."""

__version__ = "0.1.0"
