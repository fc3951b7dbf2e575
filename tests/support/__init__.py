"""Helpers that tests of several rooms import as `support.<module>`; pytest puts `tests/` on the path."""
