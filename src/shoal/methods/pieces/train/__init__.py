"""What a client does with the model that it is sent."""
