"""The server's side of a round: stages that plan the tasks of clients and fold their reports into the server state.

A stage connects client programs (`shoal.client`), clusterers (`shoal.clusterers`) and selectors (`shoal.selectors`) to
the loop of `shoal.engine`. The protocol is `shoal.types.Stage`, and `base` has the base classes.
"""
