"""Pieces for the step in which clients report vectors that represent them."""
