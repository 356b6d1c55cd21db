"""The filter, run by a small interpreter of classic BPF for both machines, and for real by the hostile tests."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from etude.sandbox import isolate

MACHINES = ("x86_64", "aarch64")
CHECKED = isolate.CHECKED | isolate.CHECKED_UNCOUNTED
CALLS = isolate.REFUSED | isolate.ABSENT | isolate.UNCOUNTED | {name: each[:2] for name, each in CHECKED.items()}
PLAIN = {
    "read": (0, 63),
    "openat": (257, 56),
    "execve": (59, 221),
    "futex": (202, 98),
    "wait4": (61, 260),
    "personality": (135, 92),
}


def verdict(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Return what the kernel would do: the meaning of the instructions, from its documentation."""
    data = struct.pack("IIQ6Q", number, architecture, 0, *(*arguments, *[0] * (6 - len(arguments))))
    code: list[tuple[int, int, int, int]] = list(struct.iter_unpack("HBBI", program))
    at = value = 0
    while True:
        operation, yes, no, constant = code[at]
        at += 1
        if operation == 0x20:
            value = int.from_bytes(data[constant : constant + 4], "little")
        elif operation == 0x54:
            value &= constant
        elif operation == 0x06:
            return constant
        else:
            test = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
            at += yes if test else no


def refused(machine: str, name: str, *arguments: int, counted: bool = True) -> int:
    """Return the error a call ends with, 0 where it is allowed."""
    which = MACHINES.index(machine)
    number = (CALLS | PLAIN)[name][which]
    assert number is not None
    found = verdict(isolate.program(machine, memory_counted=counted), isolate.ARCHITECTURE[machine], number, *arguments)
    return 0 if found == isolate.ALLOW else found & ~isolate.ERRNO


@pytest.mark.parametrize("machine", MACHINES)
def test_every_listed_call_is_refused_and_others_are_not(machine: str) -> None:
    which = MACHINES.index(machine)
    for name, numbers in isolate.REFUSED.items():
        if numbers[which] is not None:
            assert refused(machine, name) == errno.EPERM, name
    assert [refused(machine, name) for name in PLAIN] == [0] * len(PLAIN)
    for name, numbers in isolate.ABSENT.items():
        if numbers[which] is not None:
            assert refused(machine, name) == errno.ENOSYS, name
    for name in isolate.UNCOUNTED:
        assert (refused(machine, name), refused(machine, name, counted=False)) == (0, errno.EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_judged_by_their_arguments(machine: str) -> None:
    assert refused(machine, "clone3") == errno.ENOSYS
    assert refused(machine, "clone", 0x11) == refused(machine, "clone", 0x003D0F00) == 0  # fork, thread
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert refused(machine, "clone", flag | 0x11) == errno.EPERM
    allowed = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    for family in range(64):
        assert refused(machine, "socket", family) == (0 if family in allowed else errno.EAFNOSUPPORT)
    assert refused(machine, "socket", socket.AF_NETLINK, 3, 9) == errno.EAFNOSUPPORT
    assert refused(machine, "socket", socket.AF_INET, 1, 6) == 0
    assert [refused(machine, "ioctl", 0, command) for command in (0x5412, 0x541C, 0x5413)] == [
        errno.EPERM,
        errno.EPERM,
        0,
    ]
    clone, swap, flags, window = 0x40049409, 0xC0C0586D, 0x40086602, 0x5413
    assert [refused(machine, "ioctl", 0, each) for each in (clone, swap, flags, window)] == [errno.ENOTTY] * 3 + [0]
    lease, notify, pipe_size, lock = 1024, 1026, 1031, 6
    assert [refused(machine, "fcntl", 0, each) for each in (lease, notify, pipe_size, lock)] == [errno.EPERM] * 3 + [0]
    for kind, expected in ((0o020000, errno.EPERM), (0o060000, errno.EPERM), (0o010000, 0), (0o100000, 0), (0, 0)):
        assert refused(machine, "mknodat", 0, 0, kind | 0o644) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_of_no_process_is_refused_where_nothing_counts_it(machine: str) -> None:
    shared, private, of_a_file, validated = 0x21, 0x22, 0x1, 0x23
    wanted = [(shared, errno.EPERM), (private, 0), (of_a_file, 0), (validated, errno.EPERM), (0x4022, 0)]
    for flags, expected in wanted:
        assert refused(machine, "mmap", 0, 4096, 3, flags, counted=False) == expected
        assert refused(machine, "mmap", 0, 4096, 3, flags) == 0
    program, number = isolate.program(machine, memory_counted=False), CALLS["setsockopt"][MACHINES.index(machine)]
    assert number is not None
    pretended = [
        verdict(program, isolate.ARCHITECTURE[machine], number, 3, *each) for each in ((1, 7), (1, 8), (1, 2), (6, 7))
    ]
    assert pretended == [isolate.ERRNO, isolate.ERRNO, isolate.ALLOW, isolate.ALLOW]


def test_foreign_instruction_sets_are_killed_and_x32_does_not_exist() -> None:
    for machine, other in (MACHINES, MACHINES[::-1]):
        program = isolate.program(machine, memory_counted=True)
        assert verdict(program, isolate.ARCHITECTURE[other], 0) == verdict(program, 0x40000003, 0) == isolate.KILL
    program = isolate.program("x86_64", memory_counted=True)
    assert verdict(program, isolate.ARCHITECTURE["x86_64"], 0x40000000 | 165) == isolate.ERRNO | errno.ENOSYS
