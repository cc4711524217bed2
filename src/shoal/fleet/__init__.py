"""The clients, and how their work is executed: one by one, stacked, in processes, over a network."""
