"""Have Harbor itself prove tasks: its oracle agent must get 1 on each, and its agent that does nothing 0.

    python benchmarks/harbor_tasks.py [DIRECTORY] [--engine podman] [--python python3.12] [--stand-in]

Harbor needs Python 3.12 or later, so it gets an environment of its own, .venv-harbor, made at the first call. Images
come from a registry, as the Dockerfiles name them; `--stand-in` makes the one of our tasks from Debian's packages
(debootstrap, as root) where none can be reached. Prints every task's two rewards; the status is 0 if all are right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "docker.io/library/python:3.11.9-slim-bookworm"
PACKAGES = ("harbor==0.26.0", "podman-compose==1.6.0")
EXPECTED = {"oracle": 1.0, "nop": 0.0}


def python(given: str) -> str:
    """An interpreter of version 3.12 or later."""
    built = sorted(map(str, Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python")))
    for name in [given] if given else ["python3.12", "python3.13", "python3.14", "python3", *built]:
        line = [name, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]
        if shutil.which(name) and subprocess.run(line, capture_output=True, check=False).returncode == 0:
            return name
    sys.exit("Harbor needs Python 3.12 or later: install it, and name it with --python")


def environment(interpreter: str) -> Path:
    """The directory of Harbor's programs; installed if they are not there."""
    place = ROOT / ".venv-harbor"
    if not (place / "installed").exists():
        print(f"installing {', '.join(PACKAGES)} into {place} (once)", flush=True)
        subprocess.run([interpreter, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([place / "bin/python", "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (place / "installed").touch()
    return place / "bin"


def stand_in(engine: str) -> None:
    """An image under the name that our tasks want, of Debian's packages."""
    with tempfile.TemporaryDirectory() as place:
        packages = "--include=python3,sqlite3,git,procps,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", place], check=True)
        line = f"tar -C {place} -c . | {engine} import - {IMAGE}"
        subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True)


def rewards(job: Path) -> dict[str, float | None]:
    """Task -> reward, None where its trial failed."""
    found = {}
    for path in sorted(job.glob("*/result.json")):
        trial = json.loads(path.read_text())
        verdict = trial["verifier_result"]
        found[trial["task_name"]] = None if verdict is None else verdict["rewards"].get("reward")
    return found


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("directory", nargs="?", default=str(ROOT / "examples/tasks"))
    arguments.add_argument("--engine", default="podman", choices=("podman", "docker"))
    arguments.add_argument("--python", default="")
    arguments.add_argument("--stand-in", action="store_true")
    arguments.add_argument("--at-once", type=int, default=2)
    given = arguments.parse_args()
    programs = environment(python(given.python))
    if given.stand_in:
        stand_in(given.engine)
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    tasks = {str(path.parent) for path in Path(given.directory).rglob("task.toml")}
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        if given.engine == "podman" and "CONTAINERS_CONF" not in os.environ:
            # Podman's own default is above what a host without all rights can set.
            limits = Path(place, "containers.conf")
            limits.write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n')
            variables["CONTAINERS_CONF"] = str(limits)
        for agent, expected in EXPECTED.items():
            line = [str(programs / "harbor"), "run", "--path", given.directory, "--agent", agent, "--env", given.engine]
            line += ["--jobs-dir", place, "--job-name", agent, "--n-concurrent", str(given.at_once), "--yes", "--quiet"]
            start = time.monotonic()
            subprocess.run(line, env=variables, stdout=subprocess.DEVNULL, check=True)
            found = rewards(Path(place, agent))
            for task, reward in found.items():
                right = reward == expected
                wrong += not right
                print(f"{'ok   ' if right else 'WRONG'} {agent:6} {reward!s:5} {task}")
            wrong += len(tasks) != len(found)
            minutes = (time.monotonic() - start) / 60
            print(f"{agent}: {len(found)} of {len(tasks)} tasks tried, {minutes:.1f} minutes", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
