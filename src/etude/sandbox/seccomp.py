"""The system calls a sandboxed process may not make, as a classic BPF program for x86_64 and aarch64.

Namespaces and missing capabilities already refuse most of them. The filter keeps the rarely used and often broken parts of the
kernel out of reach. A refused call fails as if not permitted, so that programs go on; a foreign instruction set is killed.
`clone3` hides its flags behind a pointer: it is said not to exist, and every libc then uses `clone`, whose flags are checked.
"""

from __future__ import annotations

import errno
import struct

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; an argument has 8 bytes, the low half first
NAMESPACES = 0x7E020080  # all CLONE_NEW* flags
X32 = 0x40000000
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
DEVICES = (0x2000, 0x6000)  # S_IFCHR, S_IFBLK

# name: numbers on x86_64 and aarch64; None: there is no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458),
    "open_tree_attr": (467, 467), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "bpf": (321, 280), "perf_event_open": (298, 241),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "userfaultfd": (323, 282), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "memfd_secret": (447, 447), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "_sysctl": (156, None), "ustat": (136, None), "sysfs": (139, None),
}  # fmt: skip
CHECKED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "ioctl": (16, 29), "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip
# Memory that belongs to no process: only a memory cgroup can count it.
UNCOUNTED: dict[str, tuple[int | None, int | None]] = {"memfd_create": (319, 279), "shmget": (29, 194)}

Code = list[tuple[int, int, int, int]]  # operation, jump if true, jump if false, constant


def _fail(number: int) -> tuple[int, int, int, int]:
    return RETURN, 0, 0, ERRNO | number


def _load_argument(index: int) -> tuple[int, int, int, int]:
    return LOAD, 0, 0, FIRST_ARGUMENT + 8 * index


def _refuse_values(values: tuple[int, ...], number: int) -> Code:
    code: Code = []
    for value in values:
        code += [(EQUAL, 0, 1, value), _fail(number)]
    return code


def _device_check(argument: int) -> Code:
    return [_load_argument(argument), (AND, 0, 0, 0xF000), *_refuse_values(DEVICES, errno.EPERM), (RETURN, 0, 0, ALLOW)]


# What decides about a call once its number is known; each ends with a verdict.
CHECKS: dict[str, Code] = {
    "clone": [_load_argument(0), (ANY_BIT, 0, 1, NAMESPACES), _fail(errno.EPERM), (RETURN, 0, 0, ALLOW)],
    "clone3": [_fail(errno.ENOSYS)],
    "socket": [
        _load_argument(0),
        (EQUAL, 6, 0, UNIX), (EQUAL, 5, 0, INET), (EQUAL, 4, 0, INET6), (EQUAL, 0, 2, NETLINK),
        _load_argument(2), (EQUAL, 1, 0, 0),  # NETLINK_ROUTE
        _fail(errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW),
    ],
    "ioctl": [_load_argument(1), *_refuse_values(TERMINAL_INJECTION, errno.EPERM), (RETURN, 0, 0, ALLOW)],
    "mknod": _device_check(1),
    "mknodat": _device_check(2),
}  # fmt: skip


def program(machine: str, *, memory_counted: bool) -> bytes:
    """Return the filter for a machine. Where no cgroup counts memory, calls for memory outside processes are refused too."""
    which = list(ARCHITECTURE).index(machine)
    code: Code = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        code += [(AT_LEAST, 0, 1, X32), _fail(errno.ENOSYS)]
    for name, numbers in CHECKED.items():
        if (number := numbers[which]) is not None:
            code += [(EQUAL, 0, len(CHECKS[name]), number), *CHECKS[name]]
    refused = REFUSED if memory_counted else REFUSED | UNCOUNTED
    numbers_here = [numbers[which] for numbers in refused.values()]
    code += _refuse_values(tuple(number for number in numbers_here if number is not None), errno.EPERM)
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
