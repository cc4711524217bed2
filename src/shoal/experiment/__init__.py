"""One experiment: a job (what is asked) is assembled, run, and its result written."""
