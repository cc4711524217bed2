"""Runs the command line of shoal with `python -m shoal`."""

from shoal.cli import main

main()
