"""Studies: one file says what is run, what is measured, and which claims are judged.

Read plan.py first.
"""
