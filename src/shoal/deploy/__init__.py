"""What a real federation needs around the Flower fleet: the program that runs on a client, and a Grid to try it on."""
