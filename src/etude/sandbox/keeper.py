"""One sandbox's own process: holds its namespaces and files, and does what the host asks over a socket. Standard library only.

It is the first process of the sandbox's process namespace: when it ends, by whatever cause, the kernel ends all others in it,
and the mounts and the memory of its files go with them. Each call runs in process, mount and ipc namespaces of its own below.
Of an output the keeper holds only the beginning and the end; where no control group counts memory, it watches how much is used.
"""

# pathlib is slow to import.
# ruff: noqa: PTH115, PTH123, PTH208

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from etude.sandbox import cgroups, inside, isolate

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 1 << 18
BACKLOG = 1 << 20  # bytes waiting for the host, above which no more are taken from file work
FILE_SECONDS = 60.0
WATCH_SECONDS = 0.1
CALL_NAMESPACES = isolate.NEWPID | isolate.NEWNS | isolate.NEWIPC


class Clip:
    """The beginning and the end of a stream, and how much was between."""

    def __init__(self, limit: int) -> None:
        self.head_size, self.tail_size = limit // 2, limit - limit // 2
        self.head, self.tail = bytearray(), bytearray()
        self.cut = 0

    def add(self, block: bytes) -> None:
        room = self.head_size - len(self.head)
        self.head += block[:room]
        self.tail += block[room:]
        if (over := len(self.tail) - self.tail_size) > 0:
            del self.tail[:over]
            self.cut += over

    def __bytes__(self) -> bytes:
        return bytes(self.head + self.tail)


PIPE = 1 << 16  # bytes that one can hold
MOST_LOCKS = 1 << 18  # bytes of a list of locks, about 4,000: to list millions takes longer than to make them
IN_MEMORY = ("RssAnon", "RssShmem", "VmPTE", "HugetlbPages")


def usage(socket_memory: int) -> tuple[int, int]:
    """Return the memory, in bytes, and the number of all processes of this sandbox but the keeper.

    What sockets and pipes hold is not told; each counts as what it can hold. Locks on ranges of files lie in the kernel: too many
    are too much memory.
    """
    memory = processes = 0
    pipes: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError):  # it has just ended
                with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
                    memory += 1024 * sum(int(line.split()[1]) for line in file if line.startswith(IN_MEMORY))
                processes += 1
                for number in os.listdir(f"/proc/{name}/fd"):
                    with contextlib.suppress(OSError):  # it has just closed this one
                        pipes.add(os.readlink(f"/proc/{name}/fd/{number}"))
    pipes = {file for file in pipes if file.startswith("pipe:")}
    with open("/proc/net/sockstat", encoding="ascii") as file:
        sockets = int(file.readline().split()[2])
    with open("/proc/locks", encoding="ascii") as file:
        memory += (len(file.read(MOST_LOCKS)) == MOST_LOCKS) << 60
    return memory + PIPE * len(pipes) + socket_memory * sockets, processes


@dataclass
class Job:
    """A child at work: a call, or file work."""

    number: int
    pid: int
    pidfd: int
    started: float
    deadline: float
    status: Clip
    output: list[Clip]  # of a call: its output and error output; file work has none
    streams: dict[int, Callable[[bytes], None]]  # what to do with what comes from each descriptor
    kills: int  # for want of memory, before it began
    timed_out: bool = False
    oom: bool = False


class Keeper:
    """Serves requests, several at once."""

    def __init__(self, host: socket.socket, description: dict[str, Any], upper: int, events: int | None) -> None:
        self.host, self.upper, self.events = host, upper, events
        self.limits, self.warm = description["limits"], description["warm"]
        self.counted, self.socket_memory = description["memory_counted"], description["socket_memory"]
        self.program = isolate.program(isolate.MACHINE, memory_counted=self.counted)
        self.selector = selectors.DefaultSelector()
        self.jobs: dict[int, Job] = {}
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.next_watch = 0.0
        host.settimeout(0)
        self.selector.register(host, selectors.EVENT_READ, self.talk)

    def serve(self) -> NoReturn:
        """Work until the host closes the socket."""
        while True:
            for key, events in self.selector.select(self.patience()):
                if self.selector.get_map().get(key.fd) is key:  # it may have ended with another of this round
                    key.data(events)
            now = time.monotonic()
            for job in list(self.jobs.values()):
                if now >= job.deadline:
                    job.timed_out = True
                    self.kill(job)
            if self.jobs and not self.counted and now >= self.next_watch:
                self.next_watch = now + WATCH_SECONDS
                self.watch()

    def patience(self) -> float | None:
        """Return for how long nothing needs to be looked at."""
        if not self.jobs:
            return None
        nearest = min(job.deadline for job in self.jobs.values())
        if not self.counted:
            nearest = min(nearest, self.next_watch)
        return max(0.0, min(nearest - time.monotonic(), 3600.0))

    def kill(self, job: Job) -> None:
        """End a job's first process, and so all others of a call."""
        job.deadline = float("inf")
        signal.pidfd_send_signal(job.pidfd, signal.SIGKILL)

    def watch(self) -> None:
        """Where no cgroup bounds them: end all calls when memory or processes exceed what is allowed."""
        memory, processes = usage(self.socket_memory)
        if memory > self.limits["memory"] or processes > self.limits["processes"] + len(self.jobs) + 1:
            for job in self.jobs.values():
                job.oom = job.oom or memory > self.limits["memory"]
                self.kill(job)

    def kills(self) -> int:
        return 0 if self.events is None else cgroups.kills(self.events)

    # --- the host

    def talk(self, events: int) -> None:
        """Receive requests, send answers."""
        if events & selectors.EVENT_READ:
            self.incoming += self.host.recv(BLOCK) or os._exit(0)
            for request, payload in inside.take(self.incoming):
                self.begin(request, payload)
        if events & selectors.EVENT_WRITE:
            self.flush()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self.outgoing += inside.pack(header, payload)
        self.flush()

    def flush(self) -> None:
        """Send what the host can take; file work pauses while there is too much."""
        try:
            while self.outgoing:
                del self.outgoing[: self.host.send(memoryview(self.outgoing)[:BLOCK])]
        except BlockingIOError:
            pass
        waiting = selectors.EVENT_WRITE if self.outgoing else 0
        self.selector.modify(self.host, selectors.EVENT_READ | waiting, self.talk)

    # --- jobs

    def begin(self, request: dict[str, Any], payload: bytes) -> None:
        """Start a child for a call, or for reading and writing files."""
        kills, is_call = self.kills(), request["op"] == "exec"
        ours, ends = zip(*(os.pipe() for _ in range(3)))  # noqa: B905 - also runs on older Pythons
        theirs = [_sealed(payload if is_call else b""), *ends]  # its standard input, output, error output and status
        try:
            pid = isolate.clone(CALL_NAMESPACES) if is_call else os.fork()
        except OSError as error:
            for end in [*theirs, *ours]:
                os.close(end)
            self.send({"id": request["id"], "error": str(error)})
            return
        if pid == 0:
            self.child(theirs, partial(self.be_call if is_call else self.be_file_work, request, payload))
        for end in theirs:
            os.close(end)
        for end in ours:
            os.set_blocking(end, False)
        now, status = time.monotonic(), Clip(1 << 17)
        output = [Clip(self.limits["output"]) for _ in range(2)] if is_call else []
        forward = partial(self.send, {"id": request["id"], "more": True})
        sinks = [*((clip.add for clip in output) if is_call else [forward] * 2), status.add]
        deadline = now + (request["timeout"] if is_call else FILE_SECONDS)
        streams = dict(zip(ours, sinks))  # noqa: B905
        job = Job(request["id"], pid, os.pidfd_open(pid), now, deadline, status, output, streams, kills)
        self.jobs[job.number] = job
        for descriptor in streams:
            self.selector.register(descriptor, selectors.EVENT_READ, partial(self.read, job, descriptor))
        self.selector.register(job.pidfd, selectors.EVENT_READ, lambda _: self.finish(job))

    def read(self, job: Job, descriptor: int, _: int) -> None:
        if job.output or len(self.outgoing) < BACKLOG:
            self.drain(job, descriptor)
        else:
            time.sleep(0.001)  # the host is slow to take what it asked for

    def drain(self, job: Job, descriptor: int) -> bool:
        """Take a block; False when there is none now, or none any more."""
        try:
            block = os.read(descriptor, BLOCK)
        except BlockingIOError:
            return False
        if block:
            job.streams[descriptor](block)
            return True
        del job.streams[descriptor]
        self.forget(descriptor)
        return False

    def forget(self, descriptor: int) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)

    def finish(self, job: Job) -> None:
        """Answer for a job whose child has ended, and with it all it had started."""
        for descriptor in list(job.streams):
            while self.drain(job, descriptor):
                pass
        for descriptor in [*job.streams, job.pidfd]:  # streams: a child cloned meanwhile still had it open
            self.forget(descriptor)
        _, status = os.waitpid(job.pid, 0)
        del self.jobs[job.number]
        self.answer(job, os.waitstatus_to_exitcode(status))

    def answer(self, job: Job, rc: int) -> None:
        """Tell the host how a job ended."""
        ending = json.loads(bytes(job.status) or b"null")
        if not job.output:
            failed = {"error": "file work took too long" if job.timed_out else f"file work ended with {rc}"}
            self.send({"id": job.number, **(failed if ending is None else ending)})
            return
        out, err = map(bytes, job.output)
        oom = job.oom or self.kills() > job.kills
        message: dict[str, Any] = {"timed_out": job.timed_out, "oom": oom, "seconds": time.monotonic() - job.started}
        message |= {"id": job.number, "out": len(out), "cut": [clip.cut for clip in job.output]}
        self.send({"rc": rc, **(ending or {}), **message}, out + err)

    # --- children

    def child(self, ends: list[int], work: Callable[[], None]) -> NoReturn:
        """Be a child: only its pipes are open, only the sandbox's limits apply, and it never returns."""
        try:
            for target, end in enumerate([os.dup(end) for end in ends]):
                os.dup2(end, target)
            os.setsid()
            work()
        except BaseException as error:  # noqa: BLE001 - a child must never go on as a keeper
            inside.report(error=f"{type(error).__name__}: {error}")
        os._exit(0)

    def be_call(self, request: dict[str, Any], _: bytes) -> None:
        """Shut this child in and run the command."""
        isolate.close_others({0, 1, 2, inside.STATUS})
        isolate.limit(self.limits, memory_counted=self.counted)
        isolate.show_processes()
        isolate.volunteer()
        isolate.mask_proc()
        isolate.drop()
        isolate.install_filter(self.program)
        inside.run_as_first_process(request, self.warm_module(request))

    def warm_module(self, request: dict[str, Any]) -> str | None:
        """Return the module, if this call is `python -m MODULE` with what the launcher has in memory."""
        words, env = request["words"], request["env"]
        if not self.warm or len(words) < 3 or words[1] != "-m" or words[2] not in self.warm["modules"]:
            return None
        settings = {name: env[name] for name in env if name.startswith("PYTHON") and name != "PYTHONPATH"}
        if settings != self.warm.get("settings"):
            return None  # they are read when Python starts, which this one did long ago
        return words[2] if shutil.which(words[0], path=env.get("PATH")) == self.warm["python"] else None

    def be_file_work(self, request: dict[str, Any], payload: bytes) -> None:
        """Shut this child in and read or write files."""
        isolate.close_others({0, 1, 2, inside.STATUS, self.upper})
        if request["op"] == "walk":
            inside.walk(request, self.upper)
            return
        os.close(self.upper)
        isolate.limit(self.limits, memory_counted=self.counted)
        isolate.drop()
        isolate.install_filter(self.program)
        inside.do(request, payload)


def _sealed(content: bytes) -> int:
    """Return a descriptor of a file in memory, at its beginning, that nobody can change or make larger."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    inside.write_all(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _above_standard(descriptor: int) -> int:
    """Move a descriptor out of the way of those that children have."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)
    os.close(descriptor)
    return moved


def main(
    description: dict[str, Any], service: int, group: cgroups.Group | None, caller: tuple[int, int] | None
) -> NoReturn:
    """Be the keeper of a sandbox."""
    if group:
        os.write(group.join, b"0")
    service = _above_standard(service)
    events = _above_standard(group.events) if group else None
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    isolate.close_others({0, 1, 2, service, *([] if events is None else [events])})
    host = socket.socket(fileno=service)
    try:
        description["memory_counted"] = group is not None
        upper = _above_standard(isolate.enter(description, caller))
        keeper = Keeper(host, description, upper, events)
        keeper.send({"counted": keeper.counted})
        keeper.serve()
    except ConnectionError:  # the host has gone
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the clone must never go on as a launcher
        host.settimeout(None)
        host.sendall(inside.pack({"error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(1)
