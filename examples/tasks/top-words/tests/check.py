"""The verifier of this task. See grade.py."""

import collections
import re
import tempfile

from grade import begin, finish, run

begin()


def holds(text, n):
    with tempfile.NamedTemporaryFile("w", suffix=" x.txt") as f:
        f.write(text)
        f.flush()
        status, out = run(["bash", "/app/top_words.sh", f.name, str(n)])
    counts = collections.Counter(re.findall("[a-z]+", text.lower()))
    best = sorted(counts.items(), key=lambda p: (-p[1], p[0]))[:n]
    return status == 0 and out == "".join(f"{c} {w}\n" for w, c in best)


finish(
    {
        "a sentence": holds("It's a fine day, a FINE day indeed: day 1.\n", 3),
        "fewer words than asked for": holds("one two\n\ntwo", 10),
        "ties": holds("b a d c " * 7 + "e", 4),
    }
)
