"""The token-in-token-out gateway: agents talk to it in text, and it keeps the exact tokens of every turn.

Read next: `app`, `session`.
"""
