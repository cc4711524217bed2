"""Which clients belong together."""
