"""The cost of a run: bytes, operations, seconds and joules. Read `ledger.py` next."""
