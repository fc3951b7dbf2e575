"""The system calls that a sandbox refuses, as a program for the kernel's filter.

Namespaces already take away what these calls would reach; the filter is a second wall, against faults of the kernel
behind rarely used calls. It also closes what no namespace covers: sockets of other families than the internet's (the
host answers on AF_VSOCK in a virtual machine), keyrings, and typing into the terminal. Everything else is allowed.
The program is classic BPF over `struct seccomp_data`: see seccomp(2). Read next: `bubblewrap`.
"""

from __future__ import annotations

import errno
import platform
import struct

# Instructions: load a word, jump if equal / if at least / if any bit is set, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _MACHINE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # offsets of the low words

_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip
_REFUSED = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172,
        "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "unshare": 97,
        "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117,
        "reboot": 142, "settimeofday": 170, "adjtimex": 171, "add_key": 217, "request_key": 218, "keyctl": 219,
        "swapon": 224, "swapoff": 225, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
        "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_CLONE3 = 435


def program(machine: str = "") -> bytes | None:
    """The filter for a machine (by default this one) as `struct sock_filter`s, or None: none is written for it."""
    machine = machine or platform.machine()
    if machine not in _REFUSED:
        return None
    code = [
        *_unless(_MACHINE, _EQUAL, (_AUDIT[machine],), _KILL),  # calls of another machine have other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, 0x40000000), _refuse(errno.ENOSYS)]  # the x32 calls
    for number in sorted({**_COMMON, **_REFUSED[machine]}.values()):
        code += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    # clone3 keeps its flags where a filter cannot look; without it the C library calls clone.
    code += [(_EQUAL, 0, 1, _CLONE3), _refuse(errno.ENOSYS)]
    code += _call(_CLONE[machine], _when(_ARGUMENT_0, _ANY_BIT, (_NEW_NAMESPACES,), _refuse(errno.EPERM)))
    code += _call(_SOCKET[machine], _unless(_ARGUMENT_0, _EQUAL, _FAMILIES, _refuse(errno.EAFNOSUPPORT)[3]))
    code += _call(_IOCTL[machine], _when(_ARGUMENT_1, _EQUAL, _TERMINAL, _refuse(errno.EPERM)))
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


Instruction = tuple[int, int, int, int]


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _call(number: int, body: list[Instruction]) -> list[Instruction]:
    """`body` for this call only. It ends in allowing, because it loads something else than the call's number."""
    return [(_EQUAL, 0, len(body) + 1, number), *body, (_RETURN, 0, 0, _ALLOW)]


def _when(offset: int, test: int, values: tuple[int, ...], then: Instruction) -> list[Instruction]:
    """Return `then` where the word passes the test against any of the values."""
    code: list[Instruction] = [(_LOAD, 0, 0, offset)]
    for value in values:
        code += [(test, 0, 1, value), then]
    return code


def _unless(offset: int, test: int, values: tuple[int, ...], result: int) -> list[Instruction]:
    """Return `result` where the word passes the test against none of the values."""
    jumps = [(test, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), *jumps, (_RETURN, 0, 0, result)]
