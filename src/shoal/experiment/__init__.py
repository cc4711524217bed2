"""Experiments: a job is assembled, run and evaluated, and its result is written.

Read job.py first, then assemble.py, run.py and result.py.
"""
