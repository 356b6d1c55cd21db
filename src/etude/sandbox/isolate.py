"""How a process is shut in: identities, namespaces, a root of its own, limits, rights given up. Standard library only.

As the machine's root the sandbox's file system is built before its user namespace is entered, for only then can folders
be shown that lie below ones closed to others (/root, say). Anyone else enters first. From there on both ways are the same.
"""

# pathlib is slow to import, and a launcher must start fast.
# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH108, PTH110, PTH112, PTH114, PTH115, PTH123, PTH211, S108, B905

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
from typing import Any

from etude.sandbox import kernel

# Host ids that own nothing, where the host is root. Inside, the keeper is 0 and what it runs is 1000.
KEEPER, WORKLOAD = 61184, 61185
INSIDE = 1000
WORKSPACE = "/workspace"
READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
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
IDENTITY = "0 0 4294967295"
SYS_ADMIN = 21


def _id_map() -> list[list[str]]:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return [line.split() for line in file]


def in_first_user_namespace() -> bool:
    """Whether this process sees the machine's own ids."""
    return [" ".join(extent) for extent in _id_map()] == [IDENTITY]


def is_privileged() -> bool:
    """Whether this process may mount, and may give away files to the ids of a sandbox."""
    with open("/proc/self/status", encoding="utf-8") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    mapped = any(int(inside) <= KEEPER and int(inside) + int(size) > WORKLOAD for inside, _, size in _id_map())
    return os.geteuid() == 0 and bool(effective >> SYS_ADMIN & 1) and mapped


def owner() -> tuple[int, int]:
    """Return the host's user and group that the files of a layer must have for the workload to own them."""
    return (WORKLOAD, WORKLOAD) if is_privileged() else (os.geteuid(), os.getegid())


def first_namespaces(*, privileged: bool) -> int:
    """Return the flags with which a launcher clones a keeper."""
    flags = kernel.NEWNS | kernel.NEWPID
    return flags if privileged else flags | kernel.NEWUSER | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS


def enter(description: dict[str, Any], caller: tuple[int, int] | None) -> int:
    """Turn a fresh clone into a keeper shut in its own root; return a descriptor of what is written above the layers.

    `caller`: the host's user and group, where they are not root.
    """
    if caller is None:
        upper = build_root(description, 0, userxattr=not in_first_user_namespace())
        _enter_user_namespace()
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {caller[0]} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {caller[1]} 1")
        upper = build_root(description, INSIDE, userxattr=True)
    kernel.unshare(kernel.NEWCGROUP)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    socket.sethostname("sandbox")
    _raise_loopback()
    return upper


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _enter_user_namespace() -> None:
    """As root: leave the machine's ids for two that own nothing. Only a process still outside may say which."""
    told, tell = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(told, 1)
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/1/{name}", f"0 {KEEPER} 1\n{INSIDE} {WORKLOAD} 1")
        os._exit(0)
    flags = kernel.NEWUSER | kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    kernel.unshare(flags)
    os.write(tell, b".")
    if os.waitpid(helper, 0)[1]:
        raise OSError(f"the ids {KEEPER} and {WORKLOAD} could not be used")
    os.close(told)
    os.close(tell)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


def build_root(description: dict[str, Any], keeper: int, *, userxattr: bool) -> int:
    """Build the sandbox's file system, make it the root, and let go of the host's."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("sandbox", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4m,nr_inodes=4096,mode=755")
    os.chdir("/tmp")
    os.mkdir("host")
    kernel.pivot_root(".", "host")
    os.chdir("/")
    limits = description["limits"]
    workload = INSIDE if keeper else WORKLOAD
    upper = _mount_workspace(description["layers"], limits["disk"], limits["files"], workload, userxattr=userxattr)
    _show_system()
    _make_devices()
    for name in ("proc", "var", "run"):
        os.mkdir(name)
    os.symlink("../tmp", "var/tmp")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for source, target in description["readonly"]:
        os.makedirs(target, exist_ok=True)
        kernel.bind(f"/host{source}", target, READ_ONLY)
    for path in description["hidden"]:
        _hide(path)
    kernel.detach("/host")
    os.rmdir("/host")
    kernel.mount_attributes("/", READ_ONLY, below=False)
    return upper


def _mount_workspace(layers: list[str], disk: int, files: int, workload: int, *, userxattr: bool) -> int:
    """Mount one bounded tmpfs for all that is written, and the overlay above the layers.

    The layers go by short links: a mount's options may have 4 KiB, and a colon in a path would part it.
    """
    os.mkdir("store")
    kernel.mount(
        "store", "/store", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={disk},nr_inodes={files + 8},mode=700"
    )
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
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("workspace", WORKSPACE, "overlay", flags, options + (",userxattr" if userxattr else ""))
    os.chdir("/")
    for name in names:
        os.unlink(name)
    os.rmdir("layers")
    for source, target in (("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.makedirs(target)
        kernel.bind(f"/store/{source}", target)
    upper = os.open("/store/upper", os.O_RDONLY | os.O_DIRECTORY)
    kernel.detach("/store")
    os.rmdir("store")
    return upper


def _show_system() -> None:
    """Show the host's programs and libraries read-only, links as links, and an /etc that tells nothing of the host."""
    for name in SYSTEM:
        source = f"/host/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), name)
        elif os.path.isdir(source):
            os.mkdir(name)
            kernel.bind(source, f"/{name}", READ_ONLY)
    os.mkdir("etc")
    for name, text in ETC_TEXTS.items():
        _write(f"etc/{name}", text)
    for name in ETC:
        source, target = f"/host/etc/{name}", f"/etc/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.exists(source):
            _show(source, target, READ_ONLY)


def _show(source: str, target: str, attributes: int = 0) -> None:
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        _write(target, "")
    kernel.bind(source, target, attributes)


def _make_devices() -> None:
    for name in DEVICES:
        _show(f"/host/dev/{name}", f"/dev/{name}", kernel.ATTR_NOSUID)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"dev/{name}")


def _hide(path: str) -> None:
    """Show nothing at a path, if there is something."""
    if os.path.isdir(path):
        kernel.mount("hidden", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,nr_inodes=2,mode=555")
        kernel.mount_attributes(path, READ_ONLY, below=False)
    elif os.path.exists(path):
        kernel.bind("/dev/null", path)


def fresh_proc() -> None:
    """In the new namespaces of a call: show its own processes."""
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def volunteer() -> None:
    """Be killed for want of memory before the keeper is. Only a process that may be looked into may change this of itself."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    _write("/proc/self/oom_score_adj", "1000")


def mask_proc() -> None:
    """Show of the machine only what programs need."""
    for name in PROC_FILES_HIDDEN:
        if os.path.exists(f"/proc/{name}"):
            kernel.bind("/dev/null", f"/proc/{name}")
    for name in PROC_FOLDERS_HIDDEN:
        if os.path.exists(f"/proc/{name}"):
            kernel.bind("/run", f"/proc/{name}", READ_ONLY)
    for name in PROC_READ_ONLY:
        if os.path.exists(f"/proc/{name}"):
            kernel.bind(f"/proc/{name}", f"/proc/{name}", READ_ONLY)


def limit(limits: dict[str, Any], *, memory_counted: bool) -> None:
    """Set what the kernel bounds by process or by user. DATA rather than AS: reserving addresses costs nothing."""
    bounds = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (limits["cpu_seconds"], limits["cpu_seconds"] + 5),
        resource.RLIMIT_FSIZE: (limits["disk"], limits["disk"]),
        resource.RLIMIT_NOFILE: (1024, 4096),
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
    """Become the workload: its ids, no capabilities, no way to gain any."""
    kernel.drop_capabilities()
    if os.getuid() != INSIDE:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    kernel.clear_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o022)
