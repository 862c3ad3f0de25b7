"""What a run leaves behind: its log, its checkpoints, its progress line."""
