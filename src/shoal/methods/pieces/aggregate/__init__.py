"""Pieces for the step in which the server aggregates the models that the cohort trained."""
