"""What every client makes of the models that it is served."""
