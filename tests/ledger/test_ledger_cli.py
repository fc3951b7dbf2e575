"""`glm5 ledger` as a user runs it: piped, on a terminal, as JSON, and with options that cannot be met."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.cli.ledger import main
from glm5.model.presets import gqa_8, nano
from glm5.utils.errors import UserError

DOC = Path(__file__).parents[2] / "docs" / "ledger.md"


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    status = main(list(argv))
    assert status in (0, 1)
    return capsys.readouterr().out


# --------------------------------------------------------------------------- the ledger
def test_piped_output_is_plain_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys)
    assert "\x1b" not in out
    assert not re.search("[─│╭]", out)
    header = next(line for line in out.splitlines() if line.startswith("figure"))
    verdict = header.index("verdict")
    row = next(line for line in out.splitlines() if line.startswith("all parameters"))
    assert row[verdict:].startswith("exact")
    assert "753,864,139,008" in row
    assert "742,008,052,992 + 951,582,720 + 951,582,720 + 9,952,920,576" in row


def test_summary_counts_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "--json"))
    verdicts = [r["verdict"] for r in found["rows"]]
    summary = output(capsys).splitlines()[-1]
    for verdict, n in found["verdicts"].items():
        assert n == verdicts.count(verdict)
        assert f"{n} {verdict}" in summary


def test_json_has_numbers_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "--json"))
    assert found["published"] is True
    assert found["config"]["hidden_size"] == 6144
    (row,) = [r for r in found["rows"] if r["key"] == "mtp" and r["claim"] == "9,952,920,576"]
    assert row["value"] == 9_952_920_576
    assert row["verdict"] == "exact"
    assert row["source"].startswith("audit")
    assert row["formula"].startswith("174,406,400 + 9,702,998,272")


def test_only_one_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "--json", "--only", "not computable"))
    assert {r["verdict"] for r in found["rows"]} == {"not computable"}


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_a_terminal_gets_colours_and_loses_nothing(columns: int) -> None:
    """On a narrow terminal formulas go below their figures; numbers and verdicts are never cut."""
    text = on_terminal(["ledger"], columns)
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")
    for needed in ("753,864,139,008", "743.911218…B", "20,554,288,128", "not computable", "conflict"):
        assert needed in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= columns


def on_terminal(argv: list[str], columns: int) -> str:
    """What the command prints to a terminal `columns` wide."""
    leader, follower = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "glm5.cli.main", *argv]
    with subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=env) as process:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65_536)
            except OSError:  # how Linux reports the end
                break
            if not part:
                break
            parts.append(part)
        assert process.wait(timeout=60) == 0
    os.close(leader)
    return b"".join(parts).decode()


def test_a_configuration_from_a_file_and_from_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gqa_8(nano()).save(tmp_path)
    whole = output(capsys, "--config", str(tmp_path))
    assert "8,932,928" in whole
    assert whole.splitlines()[1:] == output(capsys, "--config", str(tmp_path / "config.json")).splitlines()[1:]
    variant = output(capsys, "--config", "nano", "--variant", "gqa-8")
    assert variant.splitlines()[1:] == whole.splitlines()[1:]
    assert "verdict" not in variant
    assert "without claims" in variant


def test_it_needs_no_torch() -> None:
    code = "import sys; from glm5.cli.ledger import main; main(['--config', 'nano']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# --------------------------------------------------------------------------- plans
def test_status_tells_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--config nano --fit cpu:4 --context 4096".split()) == 0
    assert "Fits" in capsys.readouterr().out
    assert main("--fit l40s --context 4096".split()) == 1
    assert "Does not fit" in capsys.readouterr().out


def test_plan_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--fit h200 --tp 2 --ep 8 --pp 2 --dp 4 --batch 8 --context 8192 --dtype fp8 --json"
    found = json.loads(output(capsys, *argv.split()))
    assert found["devices"] == 16
    for stage in found["stages"]:
        assert stage["total_bytes"] == sum(line["bytes"] for line in stage["lines"])
    assert found["total_bytes"] == max(s["total_bytes"] for s in found["stages"])
    assert found["fits"] == (found["total_bytes"] <= found["usable_bytes"])


def test_without_mtp_and_in_fp8_a_plan_needs_less(capsys: pytest.CaptureFixture[str]) -> None:
    def total(*more: str) -> int:
        return int(json.loads(output(capsys, "--fit", "h200", "--context", "8192", "--json", *more))["total_bytes"])

    assert total("--no-mtp") < total()
    assert total("--cache-dtype", "fp8") < total()
    assert total("--dtype", "w4a8") < total("--dtype", "fp8") < total()


def test_precision_follows_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fp32 weights, fp32 cache" in output(capsys, *"--config nano --fit cpu:8 --context 512".split())
    assert "bf16 weights, bf16 cache" in output(capsys, *"--config mini --fit cpu:8 --context 512".split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config missing", "glm5, mini, nano"),
        ("--tp 8", "--fit DEVICE"),
        ("--batch 4 --training", "--batch, --training"),
        ("--fit h200 --only exact", "--only"),
        ("--fit h999", "h100, h200"),
        ("--fit h200 --tp 7", "num_attention_heads=64"),
        ("--fit h200 --context 300000", "context=300000: must lie in [1, 202752]"),
        ("--context 0", "context=0"),
        ("--fit h200 --training --dtype fp8", "--dtype bf16"),
    ],
)
def test_mistakes_say_how_to_mend_them(argv: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        main(argv.split())
    assert message in str(caught.value)


def test_options_outside_their_choices_stop_at_the_parser() -> None:
    with pytest.raises(UserError, match="fp8") as caught:
        main(["--dtype", "int3", "--fit", "h200"])
    assert "glm5 ledger --help" in caught.value.mend


# --------------------------------------------------------------------------- the page
def examples() -> list[tuple[str, list[str]]]:
    """Commands of docs/ledger.md with the output that it shows; `...` stands for left-out lines."""
    blocks = re.findall(r"```console\n\$ glm5 ledger(.*?)\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    return [(argv, shown.rstrip("\n").split("\n")) for argv, shown in blocks]


def test_the_page_has_examples() -> None:
    assert len(examples()) >= 4


@pytest.mark.parametrize(("argv", "shown"), examples())
def test_the_page_shows_what_the_command_prints(
    argv: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = output(capsys, *shlex.split(argv)).rstrip("\n").split("\n")
    position, skipping = 0, False
    for line in shown:
        if line == "...":
            skipping = True
            continue
        if skipping:
            position = printed.index(line, position)
        assert printed[position] == line
        position, skipping = position + 1, False
    assert skipping or position == len(printed)
