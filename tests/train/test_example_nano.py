"""`examples/train_nano.py` runs from its first line to its last, and what it prints makes sense."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from test_pretrain import write_corpus

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_nano.py"


def test_the_example_trains_adapts_and_writes(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", files=60, words=150)
    for path in corpus.iterdir():  # words of many letters, for a vocabulary of 512
        path.write_text(path.read_text() + "".join(f"{path.stem}{n:x} " for n in range(int(path.stem), 400)))
    found = subprocess.run(
        [sys.executable, str(EXAMPLE), str(corpus), "--tiny"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    figures = re.findall(r"^(\S.*?)\s+([\d.]+) bits per byte, recall ([\d.]+)$", found.stdout, re.MULTILINE)
    assert [name for name, *_ in figures] == ["dense", "sparse, warm-up only", "sparse, adapted"]
    bits = [float(b) for _, b, _ in figures]
    assert bits[0] < 6  # it has learned: 9 bits a token would be chance
    assert all(0 < float(recall) <= 1 for *_, recall in figures)
    assert found.stdout.split("\nimport os\n\n\ndef ")[1].strip()
