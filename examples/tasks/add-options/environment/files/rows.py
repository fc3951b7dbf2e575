"""Print the lines of standard input, sorted."""

import sys


def main():
    lines = sys.stdin.read().splitlines()
    for line in sorted(lines):
        print(line)


main()
