"""What clients run: programs made of pure steps."""
