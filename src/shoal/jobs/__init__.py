"""Starting jobs: the launcher and sweeps."""
