"""What a real federation needs around the Flower fleet: messages and the program that runs on a client."""
