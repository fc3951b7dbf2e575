"""The verifier of this task. See grade.py."""

import os

from grade import begin, finish, read

begin()
expected = {f"img_{n:04d}.jpg": f"picture {n}\n" for n in (1, 7, 12, 103)}
expected |= {"notes.txt": "keep me\n", "IMG_x.JPG": "no number\n"}
there = os.listdir("/app/photos") if os.path.isdir("/app/photos") else []
finish({"the files": {name: read(f"/app/photos/{name}") for name in there} == expected})
