"""Attacks that run inside a sandbox: `python3 attacks.py NAME < FACTS` prints a JSON list of what succeeded; [] means it held.

FACTS (JSON) says where the host has put things that must not be reached. The same file is run without a sandbox, where most of
these must succeed: an attack that cannot succeed proves nothing. Only the standard library.
"""

# ruff: noqa: PTH103, PTH108, PTH123, PTH207, PTH208, PTH211, T201
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import glob
import itertools
import json
import mmap
import os
import re
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
Facts = dict[str, Any]
T = TypeVar("T")
DEVICES = {
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "tty",
    "ptmx",
}  # ptmx and tty are of the sandbox's own, if there at all


def call(number: int, *args: Any) -> int:
    """Return 0 or above, or −errno."""
    ctypes.set_errno(0)
    got = libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in args)
    )
    return got if got >= 0 else -ctypes.get_errno()


def tries(actions: Iterable[tuple[str, Callable[[], Any]]]) -> list[str]:
    """Return the names of those that raise no error and return something true."""
    done = []
    for name, action in actions:
        with contextlib.suppress(OSError, ValueError, EOFError):
            if action():
                done.append(name)
    return done


def reach(values: Iterable[T], action: Callable[[T], Any]) -> list[str]:
    """Return those values for which an action works."""
    return tries((str(value), functools.partial(action, value)) for value in values)


def holds_secret(path: str, facts: Facts) -> bool:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return facts["secret"].encode() in (file.read(1 << 20) or b"")


def _connect(family: int, address: Any, facts: Facts) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(2)
        made.connect(address)
        made.sendall(facts["token"].encode())
        return True


def tcp(facts: Facts) -> list[str]:
    addresses = [("127.0.0.1", facts["tcp"]), (facts["address"], facts["tcp"]), ("0.0.0.0", facts["tcp"])]
    return reach(addresses, lambda each: _connect(socket.AF_INET, each, facts))


def udp_as_dns(facts: Facts) -> list[str]:
    def ask(address: str) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.settimeout(0.3)
            made.sendto(b"\x12\x34\x01\x00\x00\x01" + facts["token"].encode(), (address, facts["udp"]))
            return bool(made.recvfrom(100))

    return reach(("127.0.0.1", facts["address"]), ask)


def unix_sockets(facts: Facts) -> list[str]:
    places = [facts["unix"], *(f"{root}{facts['unix']}" for root in glob.glob("/proc/[0-9]*/root"))]
    addresses = [*places, "\0" + facts["abstract"]]
    return reach(addresses, lambda each: _connect(socket.AF_UNIX, each, facts))


def raw_sockets(facts: Facts) -> list[str]:
    kinds = [(socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_INET, socket.SOCK_RAW, 1)]
    return reach(kinds, lambda words: socket.socket(*words).fileno())


def vsock(facts: Facts) -> list[str]:
    return tries([("vsock", lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).fileno())])


def change_network(facts: Facts) -> list[str]:
    def route(kind: int, body: bytes) -> bool:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as made:
            made.send(struct.pack("IHHII", 16 + len(body), kind, 0x605, 1, 0) + body)  # REQUEST | ACK | CREATE | EXCL
            return bool(struct.unpack("i", made.recv(4096)[16:20])[0] == 0)

    def down() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            fcntl.ioctl(made, 0x8914, struct.pack("16sH14x", b"lo", 0))  # SIOCSIFFLAGS
            return True

    dummy = (
        struct.pack("BBHiII", 0, 0, 0, 0, 0, 0) + struct.pack("HH", 16, 0x12) + struct.pack("HH6s2x", 10, 1, b"dummy\0")
    )
    return tries([("down", down), ("new link", lambda: route(16, dummy))])


def read_files(facts: Facts) -> list[str]:
    roots = ["", "/..", "/../../../../../../..", "/proc/self/root", "/proc/self/cwd/../..", "/proc/self/root/.."]
    wanted = [root + path for root in roots for path in facts["secrets"]]
    found = reach(wanted, lambda path: holds_secret(path, facts))
    return found + tries([("/etc/shadow", lambda: b":" in Path("/etc/shadow").read_bytes())])


def read_processes(facts: Facts) -> list[str]:
    """Reach files, environments, memory and descriptors of other processes, all that /proc shows and process 1 by name."""
    found = []
    for process in {*glob.glob("/proc/[0-9]*"), "/proc/1"} - {f"/proc/{os.getpid()}"}:
        paths = [f"{process}/environ", f"{process}/cmdline"]
        paths += [f"{process}/{way}{path}" for way in ("root", "cwd/../..", "cwd/..") for path in facts["secrets"]]
        paths += glob.glob(f"{process}/fd/*")
        found += reach(paths, lambda path: holds_secret(path, facts))
    return found


def own_environment(facts: Facts) -> list[str]:
    return [key for key, value in os.environ.items() if facts["secret"] in value]


def descriptors(facts: Facts) -> list[str]:
    return reach(range(3, 1024), os.fstat)


def memory_of_1(facts: Facts) -> list[str]:
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)  # whether that address is one there does not matter
    with open("/proc/1/status") as one, open("/proc/self/status") as own:
        rights = [
            [line for line in each if line.startswith(("Cap", "Seccomp:", "NoNewPrivs", "Uid"))] for each in (one, own)
        ]
    found = []  # the memory of a process with no rights but one's own is nothing to gain
    if rights[0] != rights[1]:
        found = reach(("mem", "oom_score_adj"), lambda name: os.open(f"/proc/1/{name}", os.O_RDWR))
    found += tries([("process_vm_readv", lambda: X86 and call(310, 1, vector, 1, vector, 1, 0) in {8, -errno.EFAULT})])
    # PTRACE_SEIZE: unlike ATTACH it stops nobody
    return found + tries([("ptrace", lambda: libc.ptrace(0x4206, 1, 0, 0) == 0)])


def walk_everything(facts: Facts) -> list[str]:
    """Look for a file of another sandbox, or of the host, by its name."""
    known = {"usr", "proc", "sys", "bin", "lib", "lib64", "sbin"}
    tops = facts.get("tops") or ["/" + folder for folder in os.listdir("/") if folder not in known]
    return [folder for top in tops for folder, _, files in os.walk(top) if facts["token"] in files]


def open_devices(facts: Facts) -> list[str]:
    everything = facts.get("devices") or glob.glob("/dev/**", recursive=True)
    nodes = [
        path
        for path in everything
        if Path(path).name not in DEVICES and not path.startswith(("/dev/pts/", "/dev/fd/", "/dev/std"))
    ]
    nodes = [path for path in nodes if Path(path).is_char_device() or Path(path).is_block_device()]
    return reach(nodes, lambda path: os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def make_devices(facts: Facts) -> list[str]:
    def make(folder: str) -> bool:
        path = f"{folder}/node-{os.getpid()}"
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        try:
            return len(Path(path).open("rb").read(1)) == 1
        finally:
            os.unlink(path)

    return reach((".", "/tmp", "/dev", "/dev/shm"), make)


def write_outside(facts: Facts) -> list[str]:
    """Write beside the layers, in the system, through links and hard links; the host looks, too."""
    outside, name = facts["outside"], facts["token"]
    os.symlink(outside, "way-out")
    targets = [
        f"{outside}/{name}",
        f"way-out/{name}",
        f"/proc/self/root{outside}/{name}",
        f"/proc/1/root{outside}/{name}",
    ]
    system = () if "tops" in facts else ("/usr", "/usr/bin", "/usr/lib", "/bin", "/lib")
    targets += [f"../../../../..{outside}/{name}", *(f"{top}/{name}" for top in system)]

    def write(path: str) -> bool:
        return Path(path).write_text(name) > 0

    def link() -> bool:
        os.link("kept.txt", "hard")
        return write("hard") and False  # the host sees whether its layer has changed

    found = reach(targets, write) + tries([("hard link", link)])
    for path in found:
        Path(path).unlink(missing_ok=True)
    return found


def mounts(facts: Facts) -> list[str]:
    os.makedirs("m", exist_ok=True)
    shown = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    old: dict[str, Callable[[], Any]] = {
        "tmpfs": lambda: libc.mount(b"none", b"m", b"tmpfs", 0, None) == 0,
        "bind": lambda: libc.mount(b"/", b"m", None, 4096, None) == 0,
        "proc": lambda: libc.mount(b"proc", b"m", b"proc", 0, None) == 0,
        "writable": lambda: libc.mount(None, b"/usr", None, 32 | 4096, None) == 0,
        "umount": lambda: reach(shown, lambda path: libc.umount2(os.fsencode(path), 2) == 0),
        "chroot": lambda: libc.chroot(b"m") == 0,
        "fsopen": lambda: call(430, b"tmpfs", 0) >= 0,
        "open_tree": lambda: call(428, -100, b"/", 1) >= 0,
    }
    return tries(old.items())


def _forked(action: Callable[[], bool]) -> bool:
    """Return whether it was done, in a child: it may change what this process is."""
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if action() else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def namespaces(facts: Facts) -> list[str]:
    kinds = {"user": 0x10000000, "user+mount": 0x10020000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000}
    found = reach(kinds, lambda name: _forked(lambda: libc.unshare(kinds[name]) == 0))

    def cloned() -> bool:
        if (child := call(56 if X86 else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)) == 0:
            os._exit(0)
        return child > 0

    found += tries([("clone", lambda: _forked(cloned))])
    return found + reach(glob.glob("/proc/1/ns/*"), lambda path: libc.setns(os.open(path, os.O_RDONLY), 0) == 0)


def gain_rights(facts: Facts) -> list[str]:
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    found = [key for key in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(status[key], 16)]
    found += [] if int(status["CapBnd"], 16) in {0, 1 << 5} else ["CapBnd"]  # a container's process 1 may kill
    found += [] if status["NoNewPrivs"].strip() == "1" else ["new privileges"]
    found += [] if status["Seccomp"].strip() == "2" else ["no seccomp"]
    return found + tries([("setuid 0", lambda: _forked(_become_root))] if os.getuid() else [])


def _become_root() -> bool:
    os.setuid(0)
    return os.getuid() == 0


def type_for_the_host(facts: Facts) -> list[str]:
    def push(terminal: int) -> bool:
        fcntl.ioctl(terminal, 0x5412, b"x")  # TIOCSTI
        return True

    places: list[int | str] = [0, 1, 2, "/dev/tty", facts["terminal"], "/dev/console"]
    return reach(places, lambda place: push(place if isinstance(place, int) else os.open(place, os.O_RDWR)))


def shared_memory(facts: Facts) -> list[str]:
    ways = [("sysv", lambda: libc.shmget(facts["shm_key"], 0, 0) >= 0)]
    return tries([*ways, ("/dev/shm", lambda: holds_secret(f"/dev/shm/{facts['token']}", facts))])


def kernel_settings(facts: Facts) -> list[str]:
    paths = [
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/drop_caches",
    ]
    paths += glob.glob("/sys/fs/cgroup/*/release_agent") + glob.glob("/sys/fs/cgroup/*/cgroup.procs")
    paths += ["/sys/kernel/uevent_helper", "/sys/power/state"]
    logs = ["/proc/kcore", "/proc/kmsg", "/dev/kmsg"]
    found = reach(paths, lambda path: os.open(path, os.O_WRONLY))
    return found + reach(logs, lambda path: os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 8))


SYSTEM_CALLS = {
    "io_setup": 206, "inotify_init1": 294, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "io_uring_enter": 426, "io_uring_register": 427, "request_key": 249, "kexec_file_load": 320, "finit_module": 313,
    "name_to_handle_at": 303, "fanotify_mark": 301, "memfd_secret": 447, "process_madvise": 440, "pidfd_getfd": 438, "unshare": 272,
    "io_uring_setup": 425, "keyctl": 250, "add_key": 248, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246,
    "init_module": 175, "swapon": 167, "acct": 163, "quotactl": 179, "settimeofday": 164, "open_by_handle_at": 304, "kcmp": 312,
    "fanotify_init": 300, "process_vm_writev": 311, "mount": 165, "pivot_root": 155, "setns": 308, "ptrace": 101, "mount_setattr": 442,
}  # fmt: skip


def system_calls(facts: Facts) -> list[str]:
    """Name those that the kernel itself has answered: with nonsense for arguments it says EFAULT or EINVAL, a filter EPERM."""
    if not X86:
        return []
    refused = {-errno.EPERM, -errno.ENOSYS, -errno.EACCES}
    found = [name for name, number in SYSTEM_CALLS.items() if call(number, -1, -1, -1, -1, -1, -1) not in refused]
    return found + (["clone3"] if call(435, 0, 0) != -errno.ENOSYS else [])  # libc then falls back to clone


def other_architecture(facts: Facts) -> list[str]:
    """Ask for getpid as a 32-bit program would: its numbers mean other calls, so a filter that looks at numbers alone is void."""
    if not X86:
        return []
    code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    return tries(
        [("int 0x80", lambda: _forked(lambda: run() == os.getpid())), ("x32", lambda: call(0x40000000 | 39) > 0)]
    )


def socket_families(facts: Facts) -> list[str]:
    """Packets, crypto (ALG), vsock, Bluetooth and all others; of netlink all but routes: audit, netfilter, uevents, diagnostics, …"""
    wanted = [(family, kind) for family in range(1, 46) for kind in (1, 2, 3, 5) if family not in {1, 2, 10, 16}]
    found = reach(wanted, lambda each: socket.socket(*each).fileno())
    return found + reach(range(1, 24), lambda protocol: socket.socket(16, socket.SOCK_RAW, protocol).fileno())


def port_scan(facts: Facts) -> list[str]:
    """Look for services: of the host by all its addresses, of the cloud, of the network; a proxy for packages, a container engine."""
    ports = [facts["tcp"], 22, 53, 80, 111, 443, 2375, 3128, 4873, 5000, 6379, 8000, 8080, 8081, 9000]
    places = ["127.0.0.1", "127.0.0.53", facts["address"], "169.254.169.254", "172.17.0.1", "10.0.0.1", "192.168.0.1"]
    own = facts["tcp"]  # without a sandbox the other ports and places are left alone
    pairs = [(facts["address"], own)] if "tops" in facts else [(place, port) for place in places for port in ports]
    found = reach(pairs, lambda each: _connect(socket.AF_INET, each, facts))
    return found + reach(() if "tops" in facts else ports, lambda port: _connect(socket.AF_INET6, ("::1", port), facts))


def host_ipc(facts: Facts) -> list[str]:
    """System V queues and semaphores, and a POSIX queue, of the host."""
    key, name = facts["shm_key"], f"/{facts['token']}".encode()
    ways: dict[str, Callable[[], int]] = {
        "queue": lambda: libc.msgget(key, 0),
        "semaphore": lambda: libc.semget(key, 0, 0),
        "mq": lambda: libc.mq_open(name, os.O_RDWR),
    }
    return [way for way, ask in ways.items() if ask() >= 0]


def host_events(facts: Facts) -> list[str]:
    """See what others do to files, or hold them up: inotify, dnotify, a lease."""
    own = os.open("leased", os.O_RDONLY | os.O_CREAT)
    folder = os.open("/usr/bin", os.O_RDONLY)
    ways: dict[str, Callable[[], int]] = {"inotify": lambda: libc.inotify_init1(0), "old inotify": lambda: call(253) if X86 else -1,
            "dnotify": lambda: libc.fcntl(folder, 1026, 1), "lease": lambda: libc.fcntl(own, 1024, fcntl.F_RDLCK)}  # fmt: skip
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    return [way for way, ask in ways.items() if ask() >= 0]


def kernel_parameters(facts: Facts) -> list[str]:
    """Open all of /proc/sys for writing; nothing is written."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk("/proc/sys") for name in names]  # noqa: PTH118
    return reach(paths, lambda path: os.open(path, os.O_WRONLY | os.O_NONBLOCK))[:20]


FILE_SYSTEM_IOCTLS = {
    "GETFLAGS": 0x80086601, "SETFLAGS": 0x40086602, "FSSETXATTR": 0x401C5820, "FSGETXATTR": 0x801C581F, "FICLONE": 0x40049409,
    "FICLONERANGE": 0x4020940D, "FIDEDUPERANGE": 0xC0189436, "XFS_SWAPEXT": 0xC0C0586D, "XFS_EXCHANGE_RANGE": 0x40285881,
    "XFS_FREE_EOFBLOCKS": 0x8080583A, "EXT4_MOVE_EXT": 0xC028660F, "EXT4_SWAP_BOOT": 0x6611, "FIFREEZE": 0xC0045877, "FITRIM": 0xC0185879,
    "ENABLE_VERITY": 0x40806685, "SET_ENCRYPTION": 0x800C6613, "BTRFS_SNAP": 0x50009401, "FIEMAP": 0xC020660B,
}  # fmt: skip


def file_system_ioctls(facts: Facts) -> list[str]:
    """On files that may only be read, of the system and of a layer, and between one's own: exchange, clone, flags, freeze.

    Without a sandbox only flags and extents are read.
    """
    with open("own", "wb") as file:
        file.write(b"x" * 8192)
    files = [os.open(path, os.O_RDONLY) for path in ("kept.txt", "/usr/bin/env", "/usr", "own")]
    names = ["GETFLAGS", "FSGETXATTR"] if "tops" in facts else list(FILE_SYSTEM_IOCTLS)
    found = []
    for name in names:
        for one, other in itertools.product(files, files):
            argument = bytearray(struct.pack("qqQQQ", other, 0, 0, 8192, 0) + bytes(200))
            with contextlib.suppress(OSError):
                fcntl.ioctl(one, FILE_SYSTEM_IOCTLS[name], other if name == "FICLONE" else argument)
                found.append(name)
    return sorted(set(found))


def forge_requests(facts: Facts) -> list[str]:
    """Ask whoever runs the sandbox, by every descriptor and socket there is, to write a file; the host looks for it."""
    asked = json.dumps({"id": 0, "op": "write", "path": "forged", "mode": 0o644}).encode()
    message = struct.pack(">IQ", len(asked), 1) + asked + b"x"
    listed = {line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7}
    found = reach(
        [*listed, "\0launcher", "\0keeper"], lambda name: _connect(socket.AF_UNIX, name.replace("@", "\0", 1), facts)
    )
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        if path.startswith((f"/proc/{os.getpid()}/", "/proc/self/")):
            continue
        with contextlib.suppress(OSError):
            os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), message)
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(number, message)
        found += [f"pidfd_getfd {number}"] if call(438, os.pidfd_open(1), number, 0) >= 0 else []
    return found


def kill_the_keeper(facts: Facts) -> list[str]:
    """The host sees whether the sandbox goes on. Nothing is reported: killing what is one's own is no escape."""
    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1, signal.SIGCHLD):
        for target in (1, os.getppid()):
            with contextlib.suppress(OSError):
                os.kill(target, number)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # this process and process 1 are spared
        with contextlib.suppress(OSError):
            os.kill(-1, number)
    return []


def attacks() -> Iterator[str]:
    """Name every attack of this file."""
    skipped = {"call", "tries", "reach", "holds_secret", "attacks"}
    for name, value in globals().items():
        if (
            callable(value)
            and getattr(value, "__module__", "") == __name__
            and name not in skipped
            and re.match(r"[a-z]", name)
        ):
            yield name


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](json.load(sys.stdin))))
