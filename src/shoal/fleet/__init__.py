"""Fleets: they execute the work of clients one by one, stacked, in worker processes, or over a network.

`plain` is the reference, with one client after the other. `vector` stacks clients, `pool` uses worker processes, and
`flower` sends messages over a network. `tracing` records training steps, which both `plain` and `vector` replay.
"""
