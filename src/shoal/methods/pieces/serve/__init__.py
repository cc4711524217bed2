"""Pieces for the step that sets how clients predict, including unseen clients."""
