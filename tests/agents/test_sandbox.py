"""The sandbox: what it gives a command, how it reports its end, and files in and out."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glm5.agents.sandbox import Limits, Sandbox, SandboxError, describe, host, require, seccomp
from glm5.agents.sandbox import cgroups as groups
from glm5.agents.sandbox.limits import readable
from glm5.agents.sandbox.pipes import Kept
from glm5.utils.errors import ConfigError

isolated = pytest.mark.usefixtures("isolation")


# --------------------------------------------------------------------------- what needs no isolation
def test_limits_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="memory_bytes=0"):
        Limits(memory_bytes=0)


def test_kept_holds_both_ends_and_counts_the_rest() -> None:
    kept = Kept(10)
    for byte in b"abcdefghijklmnopqrstuvwxyz":
        kept.add(bytes([byte]))
    assert kept.bytes == b"abcdevwxyz"
    assert kept.lost == 16
    short = Kept(10)
    short.add(b"abcdefgh")
    assert (short.bytes, short.lost) == (b"abcdefgh", 0)
    long = Kept(10)
    long.add(b"0" * 5 + b"1" * 1000 + b"23456")
    assert (long.bytes, long.lost) == (b"0000023456", 1000)
    one = Kept(1)
    one.add(b"xyz")
    assert (one.bytes, one.lost) == (b"x", 2)


def test_output_for_readers_cannot_steer_a_terminal() -> None:
    assert readable(b"a\xffb\x1b[2J\r\x00\t\n\xc3\xa9\xc2\x9b") == "a�b\\x1b[2J\\x0d\\x00\t\né\\x9b"


def run_filter(code: bytes, number: int, arguments: tuple[int, ...] = (), machine: int = 0xC000003E) -> int:
    """What the kernel's filter machine returns for a call, by the rules of classic BPF."""
    data = struct.pack("<IIQ6Q", number, machine, 0, *(*arguments, *[0] * (6 - len(arguments))))
    at, word = 0, 0
    while True:
        op, yes, no, k = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if op == 0x20:
            (word,) = struct.unpack_from("<I", data, k)
        elif op == 0x06:
            return k
        else:
            passed = {0x15: word == k, 0x35: word >= k, 0x45: bool(word & k)}[op]
            at += yes if passed else no


@pytest.mark.parametrize(
    ("machine", "audit", "base"), [("x86_64", 0xC000003E, (0, 59)), ("aarch64", 0xC00000B7, (63, 221))]
)
def test_filter_of_system_calls(machine: str, audit: int, base: tuple[int, int]) -> None:
    code = seccomp.program(machine)
    assert code is not None
    allow, eperm, enosys, family = 0x7FFF0000, 0x50001, 0x50000 | 38, 0x50000 | 97
    clone, socket, ioctl = seccomp._CLONE[machine], seccomp._SOCKET[machine], seccomp._IOCTL[machine]

    def result(number: int, *arguments: int) -> int:
        return run_filter(code, number, arguments, audit)

    assert [result(n) for n in base] == [allow, allow]  # read, execve
    assert result(seccomp._REFUSED[machine]["ptrace"]) == result(seccomp._REFUSED[machine]["bpf"]) == eperm
    assert result(clone, 0x00010000 | 17) == allow  # a thread
    assert result(clone, 0x10000000) == eperm  # a user namespace
    assert result(435) == enosys
    assert [result(socket, f) for f in (1, 2, 10, 16)] == [allow] * 4
    assert [result(socket, f) for f in (17, 38, 40)] == [family] * 3  # raw packets, the kernel's ciphers, the VM's host
    assert result(ioctl, 1, 0x5401) == allow
    assert result(ioctl, 1, 0x5412) == eperm
    assert run_filter(code, base[0], (), 0x40000003) == 0x80000000  # calls of another machine: killed
    if machine == "x86_64":
        assert result(0x40000000 | 101) == enosys


def test_no_filter_for_other_machines() -> None:
    assert seccomp.program("riscv64") is None


def test_missing_programs_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "which", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    host.require.cache_clear()
    try:
        with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
            Sandbox()
        assert "bubblewrap missing" in describe()
    finally:
        host.require.cache_clear()


def test_control_groups_of_both_versions_are_found(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:pids:/\n4:memory:/job/7\n0::/\n")
    for directory in ("one/memory/job/7", "one/pids"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "tasks").touch()
    found = groups.parents(tmp_path / "one", own)
    assert found == ((tmp_path / "one/memory/job/7", tmp_path / "one/pids"), False)
    own.write_text("0::/user/job\n")
    two = tmp_path / "two/user/job"
    two.mkdir(parents=True)
    assert groups.parents(tmp_path / "two", own) is None
    for directory, kinds in ((two, ""), (two.parent, "cpu memory pids")):
        (directory / "cgroup.subtree_control").write_text(kinds)
        (directory / "cgroup.procs").touch()
    assert groups.parents(tmp_path / "two", own) == ((two.parent,), True)
    own.write_text("0::/user/job/deep/deeper\n")
    (two / "deep/deeper").mkdir(parents=True)
    assert groups.parents(tmp_path / "two", own) == ((two.parent,), True)
    own.write_text("0::/\n")
    assert groups.parents(tmp_path / "two", own) is None


@pytest.mark.parametrize("path", ["workspace", "/", "/usr/x", "/a/../etc", "/proc"])
def test_writable_paths_are_checked(path: str) -> None:
    with pytest.raises(ConfigError, match="writable"):
        Sandbox(writable=[path])


# --------------------------------------------------------------------------- commands
@isolated
def test_a_command_and_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    require()
    with Sandbox(environment={"COLOUR": "red"}) as box:
        done = box.run(["bash", "-c", "cat; env; pwd; id -un; ls -A /workspace; echo bad >&2; exit 3"], stdin=b"in\n")
        assert (done.ending, done.code, done.ok, done.stderr) == ("exited", 3, False, b"bad\n")
        lines = done.stdout.decode().splitlines()
        assert lines[0] == "in"
        assert lines[-2:] == ["/workspace", "agent"]
        assert "COLOUR=red" in lines
        assert "hunter2" not in done.text
        assert box.run(["true"]).ok
        assert box.run(["/no/such/program"]).code == 127
        assert box.run(["sh", "-c", "kill -SEGV $$"]).code == 128 + 11
        with pytest.raises(SandboxError, match="cannot be started"):
            box.run(["echo", "a\0b"])
    with pytest.raises(SandboxError, match="closed"):
        box.run(["true"])


@isolated
def test_directories_apart_have_room_when_the_others_are_full() -> None:
    with Sandbox(Limits(disk_bytes=1 << 20), writable=["/a", "/b"], apart=["/b"]) as box:
        box.run(["sh", "-c", "cat /dev/zero > /a/full; cat /dev/zero > /tmp/full"])
        assert not box.run(["sh", "-c", "echo x > /a/more"]).ok
        assert box.run(["sh", "-c", "echo x > /b/more && cat /b/more"]).stdout == b"x\n"
        assert not box.run(["sh", "-c", "head -c 70M /dev/zero > /b/full"]).ok
    with pytest.raises(ConfigError, match="must be one of the writable"):
        Sandbox(writable=["/a"], apart=["/b"])


@isolated
def test_files_last_from_command_to_command_and_go_with_the_sandbox() -> None:
    with Sandbox(writable=["/app", "/tests"]) as box:
        box.put("/app/a/b.txt", b"\x00one", 0o600)
        box.put_tree({"run.sh": (b"#!/bin/sh\necho ran\n", 0o755), "d/e": (b"", 0o644)}, "/tests")
        assert box.run(["bash", "-c", "/tests/run.sh; stat -c %a a/b.txt; echo two >> a/b.txt"]).stdout == b"ran\n600\n"
        assert box.get("/app/a/b.txt") == b"\x00onetwo\n"
        assert box.get("/app/a") is None
        assert box.get("/app/none") is None
        hidden = box.run(["ls", "/", "/tests"], writable=["/app"])
        assert b"No such file" in hidden.stderr
        refused = box.run(["sh", "-c", "echo x > /tests/run.sh"], read_only=["/tests"])
        assert b"Read-only" in refused.stderr
        box.run(["sh", "-c", "mkdir -p /app/deep/er; chmod 000 /app/deep; ln -s /tests /app/link"])
        box.clear("/app")
        assert box.run(["ls", "-A", "/app", "/tests"]).stdout == b"/app:\n\n/tests:\nd\nrun.sh\n"
        assert box._group is not None
        groups_made = [d for d in box._group.directories if d.exists()]
        keeper = box._keeper.pid
    assert groups_made
    assert not [d for d in groups_made if d.exists()]
    assert not Path(f"/proc/{keeper}").exists()


WEAKER = Limits(memory_bytes=200 << 20, processes=20, control_group=False)


def test_without_a_control_group_there_is_a_sandbox_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, isolation: None
) -> None:
    monkeypatch.setattr(groups, "parents", lambda: None)
    host.require.cache_clear()
    try:
        for asked in (None, Limits()):
            with pytest.raises(SandboxError, match=r"no control group .* Limits\(control_group=False\)"):
                Sandbox(asked)
        with Sandbox(WEAKER) as box:
            assert box.run(["sh", "-c", "id -un; cat /etc/shadow"]).stdout == b"agent\n"
    finally:
        host.require.cache_clear()


@isolated
def test_without_a_control_group_each_process_has_so_much_memory_and_each_command_so_many_processes() -> None:
    with Sandbox(WEAKER) as box:
        small = box.run(["python3", "-c", "print(len(bytearray(50 << 20)))"])
        assert small.stdout == b"52428800\n"
        large = box.run(["python3", "-c", "bytearray(250 << 20)"])
        assert (large.ending, large.code) == ("exited", 1)
        assert "MemoryError" in large.text
        many = box.run(["sh", "-c", "for i in $(seq 100); do sleep 20 & done; jobs | wc -l"], wall_s=10)
        assert not many.ok
        assert b"fork" in many.stderr
        assert box.run(["true"]).ok


@isolated
@pytest.mark.parametrize("limits", [Limits(), WEAKER])
def test_closing_ends_what_runs(limits: Limits) -> None:
    box = Sandbox(limits)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(box.run, ["sh", "-c", "echo > /workspace/begun; sleep 500"], wall_s=400)
        while box.get("/workspace/begun") is None:
            time.sleep(0.01)
        box.close()
        assert not running.result(60).ok
    with pytest.raises(SandboxError, match="closed"):
        box.run(["true"])


@isolated
def test_a_tree_of_the_host_goes_in_but_links_do_not(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/y").write_bytes(b"z")
    with Sandbox(readable={"/etc/hostname": "/data/name"}) as box:
        box.put_tree(tmp_path, "/workspace")
        assert box.get("/workspace/x/y") == b"z"
        assert box.get("/data/name") == Path("/etc/hostname").read_bytes()
        (tmp_path / "link").symlink_to("/etc/shadow")
        with pytest.raises(SandboxError, match="neither file nor directory"):
            box.put_tree(tmp_path, "/workspace")


@isolated
def test_commands_side_by_side_from_any_thread() -> None:
    with Sandbox() as box, ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda n: box.run(["sh", "-c", f"sleep 0.1; echo {n}"]).stdout, range(8)))
    assert done == [f"{n}\n".encode() for n in range(8)]


@isolated
def test_the_sandbox_ends_with_its_maker(tmp_path: Path) -> None:
    """Killed without warning, a process leaves neither keeper nor command behind."""
    code = (
        "import threading,time\nfrom glm5.agents.sandbox import Sandbox\nb=Sandbox()\n"
        "threading.Thread(target=lambda: b.run(['sleep','100']),daemon=True).start()\ntime.sleep(0.5)\n"
        "print(b._keeper.pid, b._group.directories[0], flush=True)\ntime.sleep(100)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    keeper, group = maker.stdout.readline().split()
    members = Path(group, "cgroup.procs")
    assert len(members.read_text().split()) >= 3  # the keeper, bwrap, sleep
    maker.kill()
    maker.communicate()
    for _ in range(400):
        if not members.read_text().split():
            break
        time.sleep(0.02)
    assert members.read_text().split() == []
    assert keeper not in os.listdir("/proc") or "Z" in Path(f"/proc/{keeper}/stat").read_text()
    with Sandbox():  # the next one sweeps up
        assert not Path(group).exists()
