"""Pieces for the step in which the server selects the cohort of a round."""
