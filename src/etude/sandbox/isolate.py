"""How a process is shut in: identities, namespaces, a root of its own, limits, rights given up, a filter on system calls.

As the machine's root the sandbox's file system is built before its user namespace is entered, for only then can folders
be shown that lie below ones closed to others (/root, say). Anyone else enters first. From there on both ways are the same.

The filter is a classic BPF program for x86_64 and aarch64. Namespaces and missing capabilities already refuse most of what it does; it
keeps the rarely used and often broken parts of the kernel out of reach. A refused call fails as if not permitted, so that programs go
on; a foreign instruction set is killed. `clone3` hides its flags behind a pointer: it is said not to exist, and every libc then uses
`clone`, whose flags are checked.

Linux 5.14 or newer; standard library only, for a launcher must start fast.
"""

# pathlib is slow to import.
# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH108, PTH110, PTH112, PTH114, PTH115, PTH123, PTH211, S108, B905

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from typing import Any

from etude.sandbox.inside import WORKSPACE

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4
MNT_DETACH = 2
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 38, 47
AT_RECURSIVE = 0x8000
MACHINE = platform.machine()
CLONE, PIVOT_ROOT = {"x86_64": (56, 155), "aarch64": (220, 41)}.get(MACHINE, (0, 0))
CLOSE_RANGE, MOUNT_SETATTR = 436, 442  # new calls have one number everywhere

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the interpreter's lock during the call: a clone that had let go of it could not take it again.
_locked = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
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
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
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


def show_folder(source: str, target: str, *, userxattr: bool) -> None:
    """Show a folder of the host read-only, by inodes of the sandbox's own: locks and events are not shared with the host.

    Where that cannot be, as below it lies a mount of its own, it is bound. The path goes by a link, as it may hold colons; the empty
    folder is there because an overlay without one to write to needs two.
    """
    os.makedirs(target, exist_ok=True)
    os.symlink(source, "/shown/source")
    options = "lowerdir=/shown/source:/shown/empty,redirect_dir=nofollow,metacopy=off,index=off"
    options += ",userxattr" if userxattr else ""
    with open("/host/proc/self/mountinfo", encoding="utf-8") as file:
        mounts_below = any(line.split()[4].startswith(source.replace(" ", "\\040") + "/") for line in file)
    try:
        if mounts_below:
            raise OSError
        mount("shown", target, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, options)
    except OSError:
        bind(source, target, READ_ONLY)
    os.unlink("/shown/source")


def detach(target: str) -> None:
    """Unmount; whoever has it open keeps it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    words = (ctypes.c_ulong(word) for word in (value, third, 0, 0))
    _check(_libc.prctl(option, *words), f"prctl {option}")


def close_others(keep: set[int]) -> None:
    """Close all descriptors but these."""
    first = 0
    for descriptor in [*sorted(keep), 0x7FFFFFFF]:
        if first < descriptor:
            _syscall("close_range", CLOSE_RANGE, first, descriptor - 1, 0)
        first = descriptor + 1


def install_filter(program: bytes) -> None:
    """Put a seccomp program in force; there is no way back."""
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    holder = ctypes.create_string_buffer(fprog, len(fprog))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))


# Host ids that own nothing, where the host is root. Inside, the keeper is 0 and what it runs is 1000.
KEEPER, WORKLOAD = 61184, 61185
INSIDE = 1000
READ_ONLY = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
ETC_TEXTS = {
    "passwd": f"root:x:0:0:root:/:/bin/sh\nsandbox:x:{INSIDE}:{INSIDE}:sandbox:/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "group": f"root:x:0:\nsandbox:x:{INSIDE}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
PROC_FILES_HIDDEN = ("kcore", "keys", "kmsg", "kallsyms", "sched_debug", "sysrq-trigger", "timer_list", "config.gz")
PROC_FOLDERS_HIDDEN = ("acpi", "scsi", "fs", "driver", "firmware")
PROC_READ_ONLY = ("sys", "bus", "irq")
SYS_ADMIN = 21


def _id_map() -> list[list[int]]:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return [[int(word) for word in line.split()] for line in file]


def is_privileged() -> bool:
    """Whether this process may mount, and may give away files to the ids of a sandbox."""
    with open("/proc/self/status", encoding="utf-8") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    mapped = any(first <= KEEPER and first + size > WORKLOAD for first, _, size in _id_map())
    return os.geteuid() == 0 and bool(effective >> SYS_ADMIN & 1) and mapped


def owner() -> tuple[int, int]:
    """Return the host's user and group that the files of a layer must have for the workload to own them."""
    return (WORKLOAD, WORKLOAD) if is_privileged() else (os.geteuid(), os.getegid())


def first_namespaces(*, privileged: bool) -> int:
    """Return the flags with which a launcher clones a keeper."""
    return NEWNS | NEWPID if privileged else NEWNS | NEWPID | NEWUSER | NEWNET | NEWIPC | NEWUTS


def enter(description: dict[str, Any], caller: tuple[int, int] | None) -> int:
    """Turn a fresh clone into a keeper shut in its own root; return a descriptor of what is written above the layers.

    `caller`: the host's user and group, where they are not root.
    """
    if caller is None:
        upper = build_root(description, 0, userxattr=_id_map() != [[0, 0, 0xFFFFFFFF]])
        _enter_user_namespace()
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {caller[0]} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {caller[1]} 1")
        upper = build_root(description, INSIDE, userxattr=True)
    unshare(NEWCGROUP)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
    for name in ("tcp_wmem", "tcp_rmem"):  # buffers do not grow beyond what other sockets have
        _write(f"/proc/sys/net/ipv4/{name}", "4096 65536 212992")
    return upper


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _enter_user_namespace() -> None:
    """As root: leave the machine's ids for two that own nothing. Only a process still outside may say which."""
    entered, tell = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(entered, 1)
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/1/{name}", f"0 {KEEPER} 1\n{INSIDE} {WORKLOAD} 1")
        os._exit(0)
    unshare(NEWUSER | NEWNS | NEWNET | NEWIPC | NEWUTS)
    os.write(tell, b".")
    if os.waitpid(helper, 0)[1]:
        raise OSError(f"the ids {KEEPER} and {WORKLOAD} could not be used")
    os.close(entered)
    os.close(tell)
    _become(0)


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def build_root(description: dict[str, Any], keeper: int, *, userxattr: bool) -> int:
    """Build the sandbox's file system, make it the root, and let go of the host's."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("sandbox", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,nr_inodes=4096,mode=755")
    os.chdir("/tmp")
    os.mkdir("host")
    _syscall("pivot_root", PIVOT_ROOT, b".", b"host")
    os.chdir("/")
    limits = description["limits"]
    workload = INSIDE if keeper else WORKLOAD
    upper = _mount_workspace(description["layers"], limits["disk"], limits["files"], workload, userxattr=userxattr)
    for name in ("proc", "var", "run", "shown"):
        os.mkdir(name)
    mount("shown", "/shown", "tmpfs", 0, "size=4k,nr_inodes=4")
    os.mkdir("/shown/empty")
    _show_system(userxattr=userxattr)
    _make_devices(memory_counted=description["memory_counted"])
    show_processes()
    for source, target in description["readonly"]:
        show_folder(f"/host{source}", target, userxattr=userxattr)
    os.symlink("../tmp", "var/tmp")
    detach("/shown")
    os.rmdir("/shown")
    for path in description["hidden"]:
        _hide(path)
    for path in filter(os.path.isfile, (f"{WORKSPACE}/{name}" for name in description["fixed"])):
        bind(path, path, READ_ONLY)
    detach("/host")
    os.rmdir("/host")
    mount_attributes("/", READ_ONLY, below=False)
    return upper


def _mount_workspace(layers: list[str], disk: int, files: int, workload: int, *, userxattr: bool) -> int:
    """Mount one bounded tmpfs for all that is written, and the overlay above the layers.

    The layers go by short links: a mount's options may have 4 KiB, and a colon in a path would part it.
    """
    os.mkdir("store")
    mount("store", "/store", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={files + 8},mode=700")
    for name, mode in (("upper", 0o755), ("work", 0o755), ("empty", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(f"store/{name}")
        os.chmod(f"store/{name}", mode)
    os.chown("store/upper", workload, workload)
    os.chdir("/store/empty")
    os.mkdir("/layers")
    names = [f"/layers/{number}" for number in range(len(layers))]
    for name, layer in zip(names, layers):
        os.symlink(f"/host{layer}", name)
    os.chdir("/layers")
    lower = ":".join([*map(str, range(len(layers))), "../store/empty"])
    options = f"lowerdir={lower},upperdir=/store/upper,workdir=/store/work,redirect_dir=nofollow,metacopy=off,index=off"
    os.mkdir(WORKSPACE)
    options += ",userxattr" if userxattr else ""
    mount("workspace", WORKSPACE, "overlay", MS_NOSUID | MS_NODEV, options)
    os.chdir("/")
    for name in names:
        os.unlink(name)
    os.rmdir("layers")
    for source, target in (("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.makedirs(target)
        bind(f"/store/{source}", target)
    upper = os.open("/store/upper", os.O_RDONLY | os.O_DIRECTORY)
    detach("/store")
    os.rmdir("store")
    return upper


def _show_system(*, userxattr: bool) -> None:
    """Show the host's programs and libraries read-only, links as links, and an /etc that tells nothing of the host."""
    os.mkdir("etc")
    for name, text in ETC_TEXTS.items():
        _write(f"etc/{name}", text)
    for path in (*SYSTEM, *(f"etc/{name}" for name in ETC)):
        source, target = f"/host/{path}", f"/{path}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            show_folder(source, target, userxattr=userxattr)
        elif os.path.exists(source):
            with open(source, "rb") as file, open(target, "wb") as copy:
                copy.write(file.read())


def _make_devices(*, memory_counted: bool) -> None:
    """Show the host's devices. Memory of a shared mapping of /dev/zero belongs to no process; /dev/full reads alike and has none."""
    for name in DEVICES:
        _write(f"/dev/{name}", "")
        bind(f"/host/dev/{'full' if name == 'zero' and not memory_counted else name}", f"/dev/{name}", ATTR_NOSUID)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"dev/{name}")


def _hide(path: str) -> None:
    """Show nothing at a path, if there is something."""
    if os.path.isdir(path):
        mount("hidden", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,nr_inodes=2,mode=555")
        mount_attributes(path, READ_ONLY, below=False)
    elif os.path.exists(path):
        bind("/dev/null", path)


def show_processes() -> None:
    """Show those of the process namespace."""
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def volunteer() -> None:
    """Be killed for want of memory before the keeper is. Only a process that may be looked into may change this of itself."""
    prctl(PR_SET_DUMPABLE, 1)
    _write("/proc/self/oom_score_adj", "1000")


def mask_proc() -> None:
    """Show of the machine only what programs need."""
    shown = {f"/proc/{name}": ("/dev/null", 0) for name in PROC_FILES_HIDDEN}
    shown |= {f"/proc/{name}": ("/run", READ_ONLY) for name in PROC_FOLDERS_HIDDEN}
    shown |= {f"/proc/{name}": (f"/proc/{name}", READ_ONLY) for name in PROC_READ_ONLY}
    for path, (source, attributes) in shown.items():
        if os.path.exists(path):
            bind(source, path, attributes)


def limit(limits: dict[str, Any], *, memory_counted: bool) -> None:
    """Set what the kernel bounds by process or by user. DATA rather than AS: reserving addresses costs nothing."""
    bounds = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (limits["cpu_seconds"], limits["cpu_seconds"] + 5),
        resource.RLIMIT_FSIZE: (limits["disk"], limits["disk"]),
        resource.RLIMIT_NOFILE: (1024, 4096 if memory_counted else 1024),
        resource.RLIMIT_MSGQUEUE: (1 << 20, 1 << 20),
        resource.RLIMIT_NPROC: (limits["processes"], limits["processes"]),
    }
    if not memory_counted:
        bounds[resource.RLIMIT_DATA] = (limits["memory"], limits["memory"])
    for which, (soft, hard) in bounds.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)  # noqa: PLW2901 - nobody may raise its own bound
        resource.setrlimit(which, (soft, hard))


def drop() -> None:
    """Become the workload: its ids, no capabilities, no way to gain any, for programs run later included."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # the kernel knows no more
            break
    prctl(PR_CAP_AMBIENT, 4)
    if os.getuid() != INSIDE:
        _become(INSIDE)
    _check(_libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")  # empties the process's own sets
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o022)


ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; an argument has 8 bytes, the low half first
NAMESPACES = 0x7E020080  # all CLONE_NEW* flags
X32 = 0x40000000
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# By their second byte: XFS and freezing, ext4 and flags, btrfs and clones.
FILE_SYSTEM_IOCTLS = (0x5800, 0x6600, 0x9400)
# F_SETLEASE and F_NOTIFY, what others do to a file; F_SETPIPE_SZ; F_OFD_SETLK and F_OFD_SETLKW, locks that /proc/locks shows to all
FILE_CONTROLS = (0x400, 0x402, 0x407, 37, 38)
BUFFER_SIZES = (7, 8)  # SO_SNDBUF, SO_RCVBUF
DEVICE_KINDS = (0x2000, 0x6000)  # S_IFCHR, S_IFBLK

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
    "migrate_pages": (256, 238), "memfd_secret": (447, 447), "io_setup": (206, 0), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "_sysctl": (156, None), "ustat": (136, None), "sysfs": (139, None),
}  # fmt: skip
# Counted and bounded for each user of the machine, over all its sandboxes: programs go on without, as on a kernel that has none.
ABSENT: dict[str, tuple[int | None, int | None]] = {"inotify_init": (253, None), "inotify_init1": (294, 26)}
# Memory that belongs to no process: only a memory cgroup can count it.
UNCOUNTED: dict[str, tuple[int | None, int | None]] = {
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "vmsplice": (278, 75),
}  # fmt: skip

Step = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant
Code = list[Step]


def _fail(number: int) -> Step:
    return RETURN, 0, 0, ERRNO | number


def _load_argument(index: int) -> Step:
    return LOAD, 0, 0, FIRST_ARGUMENT + 8 * index


def _refuse_values(values: tuple[int, ...], number: int) -> Code:
    return [step for value in values for step in ((EQUAL, 0, 1, value), _fail(number))]


def _device_check(argument: int) -> Code:
    refused = _refuse_values(DEVICE_KINDS, errno.EPERM)
    return [_load_argument(argument), (AND, 0, 0, 0xF000), *refused, (RETURN, 0, 0, ALLOW)]


# Numbers, and what decides about a call once its number is known; each ends with a verdict.
CHECKED: dict[str, tuple[int | None, int | None, Code]] = {
    "clone": (56, 220, [_load_argument(0), (ANY_BIT, 0, 1, NAMESPACES), _fail(errno.EPERM), (RETURN, 0, 0, ALLOW)]),
    "clone3": (435, 435, [_fail(errno.ENOSYS)]),
    "socket": (41, 198, [
        _load_argument(0),
        (EQUAL, 6, 0, UNIX), (EQUAL, 5, 0, INET), (EQUAL, 4, 0, INET6), (EQUAL, 0, 2, NETLINK),
        _load_argument(2), (EQUAL, 1, 0, 0),  # NETLINK_ROUTE
        _fail(errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW),
    ]),
    "ioctl": (16, 29, [
        _load_argument(1), *_refuse_values(TERMINAL_INJECTION, errno.EPERM),
        (AND, 0, 0, 0xFF00), *_refuse_values(FILE_SYSTEM_IOCTLS, errno.ENOTTY), (RETURN, 0, 0, ALLOW),
    ]),
    "fcntl": (72, 25, [_load_argument(1), *_refuse_values(FILE_CONTROLS, errno.EPERM), (RETURN, 0, 0, ALLOW)]),
    "mknod": (133, None, _device_check(1)),
    "mknodat": (259, 33, _device_check(2)),
}  # fmt: skip

# Where no cgroup counts memory: no shared anonymous mappings, and sizes of socket buffers stay as they are.
CHECKED_UNCOUNTED: dict[str, tuple[int | None, int | None, Code]] = {
    "mmap": (9, 222, [
        _load_argument(3), (AND, 0, 0, 0x21), (EQUAL, 0, 1, 0x21), _fail(errno.EPERM), (RETURN, 0, 0, ALLOW),
    ]),
    "setsockopt": (54, 208, [
        _load_argument(1), (EQUAL, 1, 0, 1), (RETURN, 0, 0, ALLOW), _load_argument(2), *_refuse_values(BUFFER_SIZES, 0),
        (RETURN, 0, 0, ALLOW),
    ]),
}  # fmt: skip


def program(machine: str, *, memory_counted: bool) -> bytes:
    """Return the filter for a machine. Where no cgroup counts memory, calls for memory outside processes are refused too."""
    which = list(ARCHITECTURE).index(machine)
    code: Code = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        code += [(AT_LEAST, 0, 1, X32), _fail(errno.ENOSYS)]
    for *numbers, check in (CHECKED if memory_counted else CHECKED | CHECKED_UNCOUNTED).values():
        if (number := numbers[which]) is not None:
            code += [(EQUAL, 0, len(check), number), *check]
    for refused, how in ((REFUSED if memory_counted else REFUSED | UNCOUNTED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        code += _refuse_values(tuple(number for both in refused.values() if (number := both[which]) is not None), how)
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
