"""The verifier's tools: run what the agent wrote within bounds, compare, and write the reward last of all.

What the agent wrote may be hostile. It cannot read this process or the tests, which are deleted once they are loaded;
its output, time and memory are bounded; and whatever it started is dead before the reward is written.
"""

import ast
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import tempfile

REWARD = "/logs/verifier/reward.txt"
LONGEST = 4 << 20  # bytes of output


def begin():
    """Close this process to others, and take the tests away from what runs next."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    here = os.path.dirname(os.path.abspath(__file__))
    for entry in os.scandir(here):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def run(command, stdin="", seconds=10, cwd="/app"):
    """Run a command. Returns its status and its standard output; (None, "") if it cannot start or takes too long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as source:
        source.write(stdin.encode())
        source.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=source,
                stdout=out,
                stderr=subprocess.DEVNULL,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_bound,
                env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"},
            )
        except OSError:
            return None, ""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        _sweep()
        process.wait()
        if status is None:
            return None, ""
        out.seek(0)
        return status, out.read(LONGEST).decode(errors="replace")


def evaluate(directory, setup, expressions, seconds=10):
    """The `repr` of each expression after `setup`, in a process of its own; an exception as its class's name.

    The expected values never enter that process.
    """
    lines = [setup, "def _show(f):", " try: return repr(f())", " except Exception as e: return type(e).__name__"]
    lines += [f"print(ascii(_show(lambda: ({e}))), flush=True)" for e in expressions]
    program = "import sys; sys.path.insert(0, '.')\n" + "\n".join(lines)
    status, out = run(["python3", "-Es", "-c", program], "", seconds, directory)
    found = out.splitlines()[-len(expressions) :] if status == 0 else []
    return [_text(line) for line in found] or [None] * len(expressions)


def read(path):
    """A regular file as text, or None."""
    if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > LONGEST:
        return None
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def finish(checks):
    """Write 1 if every check holds, else 0, and say which do not."""
    for name, holds in checks.items():
        print(("ok      " if holds else "FAILED  ") + name)
    _sweep()
    os.makedirs(os.path.dirname(REWARD), exist_ok=True)
    if os.path.lexists(REWARD):
        os.unlink(REWARD)
    with open(REWARD, "x") as f:
        f.write("1\n" if checks and all(checks.values()) else "0\n")


def _text(line):
    try:
        return ast.literal_eval(line)
    except (SyntaxError, ValueError):
        return None


def _bound():
    resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST, LONGEST))
    resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))


def _sweep():
    """Kill every process that was started after this one."""
    for _ in range(200):
        mine = _started(os.getpid())
        others = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
        later = [p for p in others if _started(p) > mine]
        if not later:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for p in later:
                with contextlib.suppress(OSError):
                    os.kill(p, number)
        with contextlib.suppress(OSError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _started(process):
    """When a living process was started, in ticks; 0 for others."""
    try:
        with open(f"/proc/{process}/stat") as f:
            fields = f.read().rpartition(") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
