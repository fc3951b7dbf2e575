"""The verifier of this task. See grade.py."""

from grade import begin, finish, run

begin()
TEXT = "pear\napple\nfig\napple\n"


def gives(options, expected):
    return run(["python3", "/app/rows.py", *options], TEXT) == (0, "".join(f"{line}\n" for line in expected))


finish(
    {
        "as before": gives([], ["apple", "apple", "fig", "pear"]),
        "reverse": gives(["--reverse"], ["pear", "fig", "apple", "apple"]),
        "limit": gives(["--limit", "2"], ["apple", "apple"]),
        "limit 0": gives(["--limit", "0"], []),
        "both": gives(["--limit", "3", "--reverse"], ["pear", "fig", "apple"]),
        "a large limit": gives(["--reverse", "--limit=9"], ["pear", "fig", "apple", "apple"]),
        "below 0": run(["python3", "/app/rows.py", "--limit", "-1"], TEXT)[0] == 2,
    }
)
