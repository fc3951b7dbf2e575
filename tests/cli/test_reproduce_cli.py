"""`glm5 reproduce`: options, a whole comparison on a few files, and what is printed."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from glm5.cli import main as cli
from glm5.cli import reproduce as command
from glm5.cli.reproduce_report import difference, our_lines, print_comparison, report_lines, verdict_lines, write_page
from glm5.train.reproduce.outcome import Chart, Column, Comparison, ReportTable, Row
from glm5.train.reproduce.verdict import RULE, Claim, judge


@pytest.fixture(autouse=True)
def _threads_as_before() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty files of made-up words, long enough for a row of Table 6."""
    directory = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)  # noqa: S311
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(300)]
    for i in range(60):
        (directory / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=700)) + "\n")
    return directory


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = cli.main(["reproduce", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# --------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["table1", "--seeds", "0"], "seeds=0"),
        (["table1", "--steps", "0"], "steps=0"),
        (["table1", "--threads", "0"], "threads=0"),
        (["table1", "--processes", "0"], "processes=0"),
        (["table3"], "table3"),
        (["table1", "--size", "huge"], "huge"),
        ([], "table1"),
        (["table1", "--corpus", "/nowhere", "--size", "tiny", "--run"], "run"),
    ],
)
def test_wrong_options_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(*argv, capsys=capsys)
    assert status == 2
    assert said in err
    assert not out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run("table1", "--device", "cuda", "--run", str(tmp_path / "x"), capsys=capsys)
    assert status == 2
    assert "0 CUDA devices here" in err
    assert not (tmp_path / "x").exists()


def test_options_are_explained_without_torch() -> None:
    code = (
        "import sys\nfrom glm5.cli.main import main\nstatus = main(['reproduce', '--help'])\n"
        "assert status == 0\nassert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    for word in ("table1", "table2", "table6", "--size", "--seeds", "--steps", "--run", "--corpus", "--json"):
        assert word in found.stdout


# --------------------------------------------------------------------------- a whole comparison
def test_a_comparison_from_files_to_a_page(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    argv = ["table6", "--size", "tiny", "--steps", "4", "--seeds", "2", "--device", "cpu"]
    argv += ["--corpus", str(corpus), "--run", str(directory)]
    status, out, err = run(*argv, "--json", capsys=capsys)
    assert status == 0, err
    result = json.loads(out)
    assert result == json.loads((directory / "reproduction.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["dense", "warm-up only", "sparse-adapted", "dense, trained on"]
    assert result["seeds"] == [0, 1]
    assert {len(values) for row in result["rows"] for values in row["by_seed"].values()} == {2}
    assert result["settings"]["steps"] == 4
    assert result["settings"]["adapt_steps"] == 1
    assert result["environment"]["threads"] == 1
    assert result["corpus"]["source"] == str(corpus)
    for verdict in result["verdicts"]:
        assert verdict["outcome"] in ("same direction", "opposite", "within noise", "match", "no match")
    assert err.count("cell      ") == 8
    page = (directory / "report.html").read_text()
    assert "71.35" in page
    assert "<svg" in page
    assert "--steps 4" in page

    status, out, err = run(*argv, capsys=capsys)  # and again, as text: nothing is trained twice
    assert status == 0, err
    assert err.count("done before") == 8
    for part in ("Table 6", "71.35", "Warm-up alone loses", "95% interval"):
        assert part in out

    two = [*argv, "--run", str(tmp_path / "two"), "--processes", "2"]
    two.remove(str(directory))
    two.remove("--run")
    status, out, err = run(*two, "--json", capsys=capsys)  # whoever trains them, each cell is trained once
    assert status == 0, err
    assert [json.loads(out)[part] for part in ("rows", "verdicts")] == [result[part] for part in ("rows", "verdicts")]
    cells = [
        line for line in (err + (tmp_path / "two" / "process-1.log").read_text()).splitlines() if "cell   " in line
    ]
    assert sum("done before" not in line for line in cells) == 8

    status, _, err = run(*argv, "--steps", "5", capsys=capsys)
    assert status == 2
    assert "train.steps=5" in err
    assert "another directory" in err


# --------------------------------------------------------------------------- what is shown
def example() -> Comparison:
    rows = [
        Row("old", {"bits": (2.0, 2.2, 2.1)}, {"parameters": 12_345}),
        Row("new", {"bits": (1.9, 2.1, 2.0)}, {"parameters": 6_789}),
        Row("control", {"bits": (2.0, 2.0, 2.0)}, {"parameters": 1}),
    ]
    old, new = rows[0].by_seed["bits"], rows[1].by_seed["bits"]
    verdicts = [
        judge(Claim("new is better", "9 against 8", "lower"), new, old),
        judge(Claim("new is longer", "2.76 against 2.55", "higher", "tokens"), new, old),
        judge(Claim("one seed", "", "lower"), new[:1], old[:1]),
    ]
    return Comparison(
        title="Table 0",
        about="An example.",
        report=ReportTable(("score",), {"old": (8.0,), "new": (9.0,)}, "Higher is better"),
        columns=[Column("bits", 2), Column("parameters", None)],
        rows=rows,
        seeds=(0, 1, 2),
        verdicts=verdicts,
        charts=[Chart("a curve", "step", "loss", {"old": [(1, 2.0), (2, 1.0)]})],
        notes=["A note."],
    )


def test_lines_stand_beside_the_reports() -> None:
    comparison = example()
    assert report_lines(comparison) == [["score", "8.0", "9.0", "-"]]
    assert our_lines(comparison) == [
        ["bits", "2.10 ± 0.10", "2.00 ± 0.10", "2.00 ± 0.00"],
        ["parameters", "12,345", "6,789", "1"],
    ]


def test_verdicts_say_what_is_not_reproduced() -> None:
    better, longer, single = verdict_lines(example().verdicts)
    assert better == ["new is better", "9 against 8", "-4.77% ± 0.56%", "same direction"]
    assert longer[2:] == ["-0.100 ± 0.000 tokens", "opposite: not reproduced"]
    assert single[2:] == ["-5.00%", "within noise: one seed has no spread; not reproduced"]
    assert difference(example().verdicts[2]) == "-5.00%"


def test_the_terminal_and_the_page_show_both_tables_the_rule_and_the_notes(tmp_path: Path) -> None:
    comparison, stream = example(), io.StringIO()
    print_comparison(comparison, Console(file=stream, width=200))
    result = {
        "table": "table0", "size": "tiny", "date": "2026-01-01", "device": "cpu",
        "environment": {"threads": 1, "packages": {"torch": "2.13"}},
        "corpus": {"source": "stdlib", "training_tokens": 1000},
        "settings": {"steps": 3, "rows": 2, "seq_len": 8},
    }  # fmt: skip
    write_page(comparison, result, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for text in (" ".join(stream.getvalue().split()), page):
        for part in ("Table 0", "2.10 ± 0.10", "9.0", "opposite: not reproduced", "A note.", RULE[:60], "3 seeds"):
            assert part in text
    assert "glm5 reproduce table0 --size tiny --seeds 3 --steps 3 --corpus stdlib" in page
    assert "seed 2" in page


def test_seeds_by_size() -> None:
    assert command._seeds(command.ReproduceOptions("table1", size="tiny")) == 2
    assert command._seeds(command.ReproduceOptions("table1")) == 3
    assert command._seeds(command.ReproduceOptions("table1", seeds=7)) == 7


def test_other_processes_end_with_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def another(_: Any, __: Path, number: int) -> subprocess.Popen[bytes]:
        if number == 3:
            raise OSError("no more processes")
        code = "raise SystemExit(3)" if number == 1 else "import time; time.sleep(600)"
        begun.append(subprocess.Popen([sys.executable, "-c", code]))
        if number == 1:
            begun[0].wait()
        return begun[-1]

    monkeypatch.setattr(command, "_another", another)
    monkeypatch.setattr(command, "prepare_text", lambda chosen, *_: (None, chosen, {}))
    said = io.StringIO()
    options = command.ReproduceOptions("table1", size="tiny", run=tmp_path, device="cpu", processes=4)
    with pytest.raises(OSError, match="no more processes"):
        command.reproduce(options, Console(file=said))
    assert "process 1 ended with status 3: see" in said.getvalue()
    assert "process 2" not in said.getvalue()
    assert begun[1].returncode == -signal.SIGTERM
