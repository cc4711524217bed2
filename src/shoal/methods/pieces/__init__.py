"""What can stand at each step of a method: one folder for each step, one file for each piece."""
