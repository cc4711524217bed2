"""Compares our results with those of papers."""
