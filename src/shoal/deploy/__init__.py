"""What a real federation needs in addition to the Flower fleet.

`client_app` is the program that runs on a client. `loopback` is a Grid in one process, to test it without a network.
"""
