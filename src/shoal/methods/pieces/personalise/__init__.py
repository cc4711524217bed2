"""Pieces for the step in which clients personalise the models that they are served."""
