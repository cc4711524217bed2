"""Steps of a round on the server's side: how programs, clusterers and selectors meet the loop."""
