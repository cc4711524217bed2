"""Run directories: what a run leaves behind, and how it goes on after a stop."""

FORMAT = 2  # of run directories: a directory of another format is refused
