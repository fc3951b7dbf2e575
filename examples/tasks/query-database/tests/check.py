"""The verifier of this task. See grade.py."""

from grade import begin, finish, read

begin()
names = ["Ana", "Bo", "Cy", "Di", "Ed", "Flo"]
totals = dict.fromkeys(names, 0)
x = 11
for _ in range(200):
    x = x * 48271 % 2147483647
    if x // 7 % 4 in (0, 2):
        totals[names[x % 6]] += x // 100 % 5000
best = sorted(totals.items(), key=lambda p: (-p[1], p[0]))[:3]
finish({"the three": read("/app/best.txt") == "".join(f"{name},{cents}\n" for name, cents in best)})
