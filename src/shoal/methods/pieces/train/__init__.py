"""Pieces for the step in which the cohort trains."""
