"""Run directories: what a run leaves behind, and how it goes on after a stop."""
