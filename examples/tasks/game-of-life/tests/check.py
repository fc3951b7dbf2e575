"""The verifier of this task. See grade.py."""

from grade import begin, finish, run

begin()
CASES = {
    "1\n.....\n..#..\n..#..\n..#..\n.....\n": ".....\n.....\n.###.\n.....\n.....\n",
    "0\n#.\n..\n": "#.\n..\n",
    "4\n.#....\n..#...\n###...\n......\n......\n......\n": "......\n..#...\n...#..\n.###..\n......\n......\n",
    "24\n.#....\n..#...\n###...\n......\n......\n......\n": ".#....\n..#...\n###...\n......\n......\n......\n",
    "3\n.##.....\n..##....\n........\n#.......\n##......\n": "#..#...#\n####....\n#.......\n........\n..#....#\n",
}


def gives(stdin, expected):
    status, out = run(["python3", "/app/life.py"], stdin)
    return status == 0 and out.split("\n") == expected.split("\n")


finish({repr(stdin)[:60]: gives(stdin, expected) for stdin, expected in CASES.items()})
