"""The engine and its server: a prompt becomes tokens. Read next: `request`."""
