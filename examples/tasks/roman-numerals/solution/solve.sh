#!/bin/bash
set -euo pipefail
cat > /app/roman.py <<'END'
PARTS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
         (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def to_roman(n):
    if not 1 <= n <= 3999:
        raise ValueError(n)
    text = ""
    for value, letters in PARTS:
        text += letters * (n // value)
        n %= value
    return text


def from_roman(text):
    n, rest = 0, text
    for value, letters in PARTS:
        while rest.startswith(letters):
            n, rest = n + value, rest[len(letters):]
    if not 1 <= n <= 3999 or to_roman(n) != text:
        raise ValueError(text)
    return n
END
