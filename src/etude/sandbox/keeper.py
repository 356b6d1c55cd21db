"""One sandbox's own process: holds its namespaces and files, and does what the host asks over a socket. Standard library only.

It is the first process of the sandbox's process namespace: when it ends, by whatever cause, the kernel ends all others in it,
and the mounts and the memory of its files go with them. Each call runs in process, mount and ipc namespaces of its own below.

What a keeper itself bounds: how much it keeps of an output and, where no control group counts, how much memory is used.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from etude.sandbox import cgroups, inside, isolate, wire

if TYPE_CHECKING:
    from collections.abc import Callable


class Kept:
    """The beginning and the end of a stream, and how much was between."""

    def __init__(self, limit: int) -> None:
        self.head_size, self.tail_size = limit // 2, limit - limit // 2
        self.head, self.tail = bytearray(), bytearray()
        self.cut = 0

    def add(self, block: bytes) -> None:
        """Take the next bytes."""
        room = self.head_size - len(self.head)
        self.head += block[:room]
        self.tail += block[room:]
        if (over := len(self.tail) - self.tail_size) > 0:
            del self.tail[:over]
            self.cut += over

    def whole(self) -> bytes:
        """Return what is kept."""
        return bytes(self.head + self.tail)


def usage() -> tuple[int, int]:
    """Return the memory, in bytes, and the number of all processes of this sandbox but the keeper."""
    memory = processes = 0
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                    sizes = [line.split()[1] for line in file if line.startswith(("RssAnon", "RssShmem"))]
            except OSError:  # it has just ended
                continue
            processes += 1
            memory += 1024 * sum(map(int, sizes))
    return memory, processes


BLOCK = 1 << 18
BACKLOG = 1 << 20  # bytes waiting for the host, above which no more are taken from file work
FILE_SECONDS = 60.0
WATCH_SECONDS = 0.1


@dataclass
class Job:
    """A child at work: a call, or file work."""

    number: int
    pid: int
    pidfd: int
    started: float
    deadline: float
    streams: dict[int, Callable[[bytes], None]]  # what to do with what comes from each descriptor
    status: Kept
    input: tuple[int, memoryview] | None = None
    out: Kept | None = None
    err: Kept | None = None
    kills: int = 0  # for want of memory, before it began
    timed_out: bool = False
    oom: bool = False


class Pipes:
    """A child's standard input, output, error output and status: the child's ends, and those that stay."""

    def __init__(self) -> None:
        pairs = [os.pipe() for _ in range(4)]
        self.child = [pairs[0][0], *(written for _, written in pairs[1:])]
        self.keeper = [pairs[0][1], *(read for read, _ in pairs[1:])]
        for end in self.keeper:
            os.set_blocking(end, False)

    def close(self) -> None:
        """Close both ends."""
        for end in [*self.child, *self.keeper]:
            os.close(end)


class Keeper:
    """Serves requests, several at once."""

    def __init__(self, host: socket.socket, description: dict[str, Any], upper: int, groups: cgroups.Groups) -> None:
        self.host, self.upper, self.groups = host, upper, groups
        self.limits = description["limits"]
        self.backend = description["backend"]
        self.warm = description["warm"]
        self.counted = groups.events is not None
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
        memory, processes = usage()
        if memory > self.limits["memory"] or processes > self.limits["processes"] + len(self.jobs) + 1:
            for job in self.jobs.values():
                job.oom = job.oom or memory > self.limits["memory"]
                self.kill(job)

    # --- the host

    def talk(self, events: int) -> None:
        """Receive requests, send answers."""
        if events & selectors.EVENT_READ:
            self.incoming += self.host.recv(BLOCK) or os._exit(0)
            for request, payload in wire.take(self.incoming):
                self.begin(request, payload)
        if events & selectors.EVENT_WRITE:
            self.flush()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queue a message for the host."""
        self.outgoing += wire.pack(header, payload)
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
        """Start what was asked for."""
        pipes = Pipes()
        try:
            if request["op"] == "exec":
                self.begin_call(request, payload, pipes)
            else:
                self.begin_file_work(request, payload, pipes)
        except OSError as error:
            pipes.close()
            self.send({"id": request["id"], "error": str(error)})

    def begin_call(self, request: dict[str, Any], stdin: bytes, pipes: Pipes) -> None:
        """Run a command."""
        kills = cgroups.kills(self.groups.events) if self.groups.events is not None else 0
        pid = isolate.clone(isolate.NEWPID | isolate.NEWNS | isolate.NEWIPC)
        if pid == 0:
            self.child(pipes.child, lambda: self.be_call(request))
        out, err = Kept(self.limits["output"]), Kept(self.limits["output"])
        job = self.add_job(request, pid, pipes, [out.add, err.add], request["timeout"])
        job.out, job.err, job.kills = out, err, kills
        if stdin:
            job.input = (pipes.keeper[0], memoryview(stdin))
            self.selector.register(pipes.keeper[0], selectors.EVENT_WRITE, lambda _: self.feed(job))
        else:
            os.close(pipes.keeper[0])

    def begin_file_work(self, request: dict[str, Any], payload: bytes, pipes: Pipes) -> None:
        """Read or write files."""
        pid = os.fork()
        if pid == 0:
            self.child(pipes.child, lambda: self.be_file_work(request, payload))

        def forward(block: bytes) -> None:
            self.send({"id": request["id"], "more": True}, block)

        self.add_job(request, pid, pipes, [forward, forward], FILE_SECONDS)
        os.close(pipes.keeper[0])

    def add_job(
        self, request: dict[str, Any], pid: int, pipes: Pipes, sinks: list[Callable[[bytes], None]], seconds: float
    ) -> Job:
        """Watch over a child that has just begun."""
        for end in pipes.child:
            os.close(end)
        now = time.monotonic()
        status = Kept(1 << 17)
        streams = dict(zip(pipes.keeper[1:], [*sinks, status.add]))  # noqa: B905 - also runs on older Pythons
        job = Job(request["id"], pid, os.pidfd_open(pid), now, now + seconds, streams, status)
        self.jobs[job.number] = job
        for descriptor in streams:
            self.selector.register(descriptor, selectors.EVENT_READ, self.reader(job, descriptor))
        self.selector.register(job.pidfd, selectors.EVENT_READ, lambda _: self.finish(job))
        return job

    def reader(self, job: Job, descriptor: int) -> Callable[[int], None]:
        """Return what takes bytes from one of a job's descriptors."""

        def take(_: int) -> None:
            if len(self.outgoing) < BACKLOG or job.out is not None:
                self.drain(job, descriptor)
            else:
                time.sleep(0.001)  # the host is slow to take what it asked for

        return take

    def drain(self, job: Job, descriptor: int) -> bool:
        """Take a block; False when there is none now, or none any more."""
        try:
            block = os.read(descriptor, BLOCK)
        except BlockingIOError:
            return False
        if block:
            job.streams[descriptor](block)
            return True
        self.selector.unregister(descriptor)
        del job.streams[descriptor]
        os.close(descriptor)
        return False

    def feed(self, job: Job) -> None:
        """Give a command some of its standard input."""
        assert job.input is not None
        entry, left = job.input
        try:
            job.input = (entry, left[os.write(entry, left) :])
        except BrokenPipeError:
            job.input = (entry, left[:0])
        if not job.input[1]:
            self.end_input(job)

    def end_input(self, job: Job) -> None:
        """Close a command's standard input."""
        if job.input is not None:
            self.selector.unregister(job.input[0])
            os.close(job.input[0])
            job.input = None

    def finish(self, job: Job) -> None:
        """Answer for a job whose child has ended, and with it all it had started."""
        for descriptor in list(job.streams):
            while self.drain(job, descriptor):
                pass
            if descriptor in job.streams:  # a child cloned meanwhile still had it open
                self.selector.unregister(descriptor)
                os.close(descriptor)
        self.end_input(job)
        self.selector.unregister(job.pidfd)
        os.close(job.pidfd)
        _, status = os.waitpid(job.pid, 0)
        del self.jobs[job.number]
        self.answer(job, os.waitstatus_to_exitcode(status))

    def answer(self, job: Job, rc: int) -> None:
        """Tell the host how a job ended."""
        told = json.loads(job.status.whole() or b"null")
        if job.out is None or job.err is None:
            failed = {"error": "file work took too long" if job.timed_out else f"file work ended with {rc}"}
            self.send({"id": job.number, **(failed if told is None else told)})
            return
        oom = job.oom or (self.groups.events is not None and cgroups.kills(self.groups.events) > job.kills)
        out, err = job.out.whole(), job.err.whole()
        ending = {"rc": rc, **(told or {})}
        if self.backend == "bubblewrap" and 128 < ending["rc"] <= 128 + signal.NSIG:
            ending["rc"] = 128 - ending["rc"]  # it ends as a shell does when its command is killed
        ending |= {"id": job.number, "timed_out": job.timed_out, "oom": oom, "seconds": time.monotonic() - job.started}
        self.send({**ending, "out": len(out), "cut": [job.out.cut, job.err.cut]}, out + err)

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

    def be_call(self, request: dict[str, Any]) -> None:
        """Shut this child in and run the command. Under bubblewrap it is bubblewrap that installs the filter."""
        isolate.close_others({0, 1, 2, inside.STATUS})
        isolate.limit(self.limits, memory_counted=self.counted)
        isolate.fresh_proc()
        isolate.volunteer()
        if self.backend == "bubblewrap":
            request["words"] = [*bubblewrap_words(self.program), *request["words"]]
            isolate.drop()
            inside.run_as_first_process(request, None)
        else:
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
        found = shutil.which(words[0], path=env.get("PATH"))
        return words[2] if found == self.warm["python"] else None

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


BUBBLEWRAP = "/usr/bin/bwrap"


def bubblewrap_words(program: bytes) -> list[str]:
    """Return the command line before a call's own; the filter is in a pipe that it inherits."""
    source, target = os.pipe()
    os.write(target, program)
    os.close(target)
    os.set_inheritable(source, True)  # noqa: FBT003
    options = [
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--dev-bind",
        "/",
        "/",
        "--proc",
        "/proc",
    ]
    # Bubblewrap's own first process would be outside of the filter; this one has no more rights than what it runs.
    first = ["/bin/sh", "-c", '"$0" "$@"; exit $?']  # it says 127 where there is no such command
    return [BUBBLEWRAP, *options, "--seccomp", str(source), "--", *first]


def _above_standard(descriptor: int) -> int:
    """Move a descriptor out of the way of those that children have."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)
    os.close(descriptor)
    return moved


def main(service: int, groups: cgroups.Groups, caller: tuple[int, int] | None) -> NoReturn:
    """Be the keeper of a sandbox that the first message on the socket describes."""
    for descriptor in groups.join:
        os.write(descriptor, b"0")
    service = _above_standard(service)
    groups.events = None if groups.events is None else _above_standard(groups.events)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    isolate.close_others({0, 1, 2, service, *([] if groups.events is None else [groups.events])})
    host = socket.socket(fileno=service)
    try:
        description = _receive_description(host)
        upper = _above_standard(isolate.enter(description, caller))
        keeper = Keeper(host, description, upper, groups)
        keeper.send({"ready": True, "counted": keeper.counted})
        keeper.serve()
    except ConnectionError:  # the host has gone
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - the clone must never go on as a launcher
        host.settimeout(None)
        host.sendall(wire.pack({"ready": False, "error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(1)


def _receive_description(host: socket.socket) -> dict[str, Any]:
    buffer = bytearray()
    while block := host.recv(BLOCK):
        buffer += block
        for description, _ in wire.take(buffer):
            return description
    os._exit(0)
