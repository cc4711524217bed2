"""What the server makes of what returns from training."""
