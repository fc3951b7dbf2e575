"""Weights in few bits. Read next: `int4`."""
