"""The system calls that Python has no function for. Linux 5.14 or newer; standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4
MNT_DETACH = 2
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = (
    1,
    4,
    22,
    24,
    38,
    47,
)
AT_RECURSIVE = 0x8000
MACHINE = platform.machine()
CLONE, PIVOT_ROOT = {"x86_64": (56, 155), "aarch64": (220, 41)}.get(MACHINE, (0, 0))
CLOSE_RANGE, MOUNT_SETATTR = 436, 442  # new calls have one number everywhere

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock during the call: a clone that had let go of it could not take it again.
_locked = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *values: int | bytes | None) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in values]
    return _check(_libc.syscall(ctypes.c_long(number), *words), what)


def clone(flags: int) -> int:
    """Fork into new namespaces; returns 0 in the child. For processes with one thread only."""
    signal_at_end = 17  # SIGCHLD
    child = _locked.syscall(*(ctypes.c_long(value) for value in (CLONE, flags | signal_at_end, 0, 0, 0, 0)))
    return _check(child, "clone into new namespaces")


def unshare(flags: int) -> None:
    """Leave some namespaces for new ones."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount a file system."""
    words = [os.fsencode(source), os.fsencode(target), kind.encode() if kind else None]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {kind or source} at {target}")


def mount_attributes(target: str, attributes: int, *, below: bool) -> None:
    """Add attributes to a mount, and to those below it."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if below else 0
    _syscall(f"restrict mount {target}", MOUNT_SETATTR, -100, os.fsencode(target), flags, attr, len(attr))


def bind(source: str, target: str, attributes: int = 0) -> None:
    """Show a file or folder, with what is mounted in it, in a second place."""
    mount(source, target, None, MS_BIND | MS_REC)
    if attributes:
        mount_attributes(target, attributes, below=True)


def detach(target: str) -> None:
    """Unmount; whoever has it open keeps it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and show the old one at `old`."""
    _syscall("pivot_root", PIVOT_ROOT, os.fsencode(new), os.fsencode(old))


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    """Change an attribute of the calling process."""
    words = (ctypes.c_ulong(word) for word in (value, third, 0, 0))
    _check(_libc.prctl(option, *words), f"prctl {option}")


def close_others(keep: set[int]) -> None:
    """Close all descriptors but these."""
    first = 0
    for descriptor in [*sorted(keep), 0x7FFFFFFF]:
        if first < descriptor:
            _syscall("close_range", CLOSE_RANGE, first, descriptor - 1, 0)
        first = descriptor + 1


def drop_capabilities() -> None:
    """Give up all capabilities for good, those of programs run later included."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # the kernel knows no more
            break
    prctl(PR_CAP_AMBIENT, 4)


def clear_capabilities() -> None:
    """Empty the calling process's own sets."""
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def install_filter(program: bytes) -> None:
    """Put a seccomp program in force; there is no way back."""
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    holder = ctypes.create_string_buffer(fprog, len(fprog))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))
