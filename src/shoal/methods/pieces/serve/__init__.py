"""What a client predicts with, also one that never trained."""
