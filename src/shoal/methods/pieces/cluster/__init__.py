"""Pieces for the step in which the server forms clusters of clients."""
