"""How the server learns what clients are like."""
