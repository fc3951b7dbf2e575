"""The commands and programs in README and docs are run, in their order, as a reader would run them.

Every fenced block names its language. `bash` and `python` blocks are run, and the `$ ` lines of `console` blocks, each
document's in one directory that sees the repository but keeps what is written. Other blocks are text. A block that
cannot be run here carries `<!-- not run: reason -->` on the line before it, and the test run lists it. Long commands
have quick equivalents below.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from glm5.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("bash", "console", "python")
TEXT = ("text", "json", "jsonl", "toml", "yaml", "html", "diff", "mermaid", "math")
# What takes minutes, or would run this very test again, and what is run in its place.
EQUIVALENTS = {
    "make demo": "glm5 demo --quick --no-chat",
    "glm5 demo": "glm5 demo --quick --no-chat",
    "make test": f"cd '{ROOT}' && python -m pytest -q -p no:cacheprovider tests/utils/test_files.py && cd -",
    "make lint": f"cd '{ROOT}' && ruff check . && cd -",
    "make format": f"cd '{ROOT}' && ruff format --check . && cd -",
}
NOT_RUN = re.compile(r"<!-- not run: (\S.*\S|\S) -->")
TIMEOUT_S = 400


@dataclass(frozen=True)
class Block:
    """One fenced block: where it starts, its language and text, and why it is not run (empty: it is)."""

    where: str
    language: str
    text: str
    not_run: str = ""


def blocks(markdown: str, name: str) -> list[Block]:
    """The fenced blocks of a document, in order. A fence may be indented, and longer than three characters."""
    found: list[Block] = []
    fence, start, language, body, indent, reason = "", 0, "", [""], 0, ""
    before = ""
    for number, line in enumerate(markdown.splitlines(), 1):
        match = re.match(r"^( *)(`{3,}|~{3,})\s*([\w+-]*).*$", line)
        if not fence and match:
            indent, fence, language = len(match[1]), match[2], match[3]
            marker = NOT_RUN.fullmatch(before.strip())
            start, body, reason = number, [], marker[1] if marker else ""
        elif fence and re.fullmatch(rf" *{re.escape(fence[0])}{{{len(fence)},}} *", line):
            found.append(Block(f"{name}:{start}", language, "\n".join(body) + "\n", reason))
            fence = ""
        elif fence:
            body.append(line[indent:] if line[:indent].isspace() else line)
        before = line
    if fence:
        raise ValueError(f"{name}:{start}: a block that does not end")
    return found


def script(block: Block) -> str:
    """The commands of a bash or console block, each long one replaced by its quick equivalent."""
    lines = []
    text = block.text.splitlines()
    if block.language == "console":
        text = [line.removeprefix("$ ") for line in text if line.startswith("$ ")]
    for line in text:
        command = line.split(" #")[0].strip()
        if command.startswith("make ") and command not in EQUIVALENTS:
            raise ValueError(f"{block.where}: no quick equivalent of {command!r}: add one to {Path(__file__).name}")
        lines.append(EQUIVALENTS.get(command, line))
    return "\n".join(lines) + "\n"


def working_directory(parent: Path) -> Path:
    """A directory in which the repository's files are seen, and `runs/` and other new files stay."""
    directory = parent / "glm5"
    directory.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (directory / path.name).symlink_to(path)
    return directory


def execute(block: Block, directory: Path) -> None:
    """Run one block; fails with its place and the end of its output."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if block.language != "python":
        command, text = ["bash", "-euo", "pipefail"], script(block)
    else:
        command, text = [sys.executable], block.text
    # The text comes by a file and not by standard input, which a command in it might read.
    path = directory.parent / f"block-{block.where.rpartition(':')[2]}"
    path.write_text(text)
    found = subprocess.run(
        [*command, str(path)],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if found.returncode != 0:
        pytest.fail(f"{block.where} ended with status {found.returncode}:\n{text}\n--- output\n{found.stdout[-4000:]}")


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_the_documents(document: Path, tmp_path: Path) -> None:
    directory = working_directory(tmp_path)
    for block in blocks(document.read_text(encoding="utf-8"), str(document.relative_to(ROOT))):
        if block.language in RUN and block.not_run:
            warnings.warn(f"{block.where} is not run: {block.not_run}", UserWarning, stacklevel=1)
        elif block.language in RUN:
            execute(block, directory)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_names_a_known_language(document: Path) -> None:
    for block in blocks(document.read_text(encoding="utf-8"), str(document.relative_to(ROOT))):
        assert block.language in RUN + TEXT, f"{block.where}: ```{block.language}: name one of {', '.join(RUN + TEXT)}"


def test_options_that_the_readme_shows_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of commands that are not run here, too."""
    monkeypatch.setenv("COLUMNS", "400")
    shown: dict[tuple[str, ...], set[str]] = {}
    for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"), "README.md"):
        for line in script(block).splitlines() if block.language == "bash" else ():
            words = line.split(" #")[0].split()
            if words[:1] == ["glm5"] and words[1] != "demo":
                command = tuple(words[1 : 3 if words[1] == "rl" else 2])
                shown.setdefault(command, set()).update(word for word in words if word.startswith("--"))
    assert ("midtrain",) in shown
    for command, options in shown.items():
        with contextlib.suppress(SystemExit):
            main([*command, "--help"])
        known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
        assert options <= known, f"glm5 {' '.join(command)}"


def test_the_makefile_has_each_target_that_is_replaced() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in EQUIVALENTS:
        if command.startswith("make "):
            assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE), command


# --------------------------------------------------------------------------- the runner itself
EXAMPLE = """# Title
```bash
make demo   # ten minutes
echo hello
```
<!-- not run: needs a GPU -->
```python
import nothing_there
```
- a list:
  ~~~~bash
  if true; then
    echo '~~~'
  fi
  ~~~~
<!-- not run: too far away -->

```text
not a command
```
"""


def test_blocks_are_found_with_place_language_and_marker() -> None:
    assert blocks(EXAMPLE, "x.md") == [
        Block("x.md:2", "bash", "make demo   # ten minutes\necho hello\n"),
        Block("x.md:7", "python", "import nothing_there\n", "needs a GPU"),
        Block("x.md:11", "bash", "if true; then\n  echo '~~~'\nfi\n"),
        Block("x.md:18", "text", "not a command\n"),
    ]
    with pytest.raises(ValueError, match=r"x\.md:1: a block that does not end"):
        blocks("```bash\necho", "x.md")


def test_long_commands_are_replaced_and_unknown_ones_refused() -> None:
    assert script(blocks(EXAMPLE, "x.md")[0]) == "glm5 demo --quick --no-chat\necho hello\n"
    assert script(Block("x.md:1", "console", "$ make demo\nwhat it prints\n$ ls\n")) == (
        "glm5 demo --quick --no-chat\nls\n"
    )
    with pytest.raises(ValueError, match=r"x\.md:3: no quick equivalent of 'make world'"):
        script(Block("x.md:3", "bash", "make world\n"))


def test_blocks_are_run_and_share_a_directory(tmp_path: Path) -> None:
    directory = working_directory(tmp_path)
    execute(Block("x.md:1", "bash", "glm5 --version > version\ntest -f pyproject.toml\n"), directory)
    execute(Block("x.md:2", "python", "import glm5\nassert glm5.__version__ in open('version').read()\n"), directory)
    assert not (ROOT / "version").exists()


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "false\ntrue\n"),
        ("bash", "false | true\n"),
        ("python", "1 / 0\n"),
        ("bash", "read x\n"),
        ("console", "$ false\n"),
    ],
)
def test_a_failing_block_fails_by_its_place(tmp_path: Path, language: str, text: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"x\.md:9 ended with status 1"):
        execute(Block("x.md:9", language, text), working_directory(tmp_path))
