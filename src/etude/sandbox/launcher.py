"""The small process that every sandbox of a host process is forked from. Standard library only; one thread.

The host is large and has threads: forking it is slow and unsafe. This one is small, or *warm*: it has imported the modules a
task's test run needs, by the task's own Python, and what is forked from it has them in memory. It runs nothing of a model.

The host passes the socket that a sandbox's keeper is to serve. The launcher keeps it, too: when the host sees it closed, the sandbox
is gone, its processes, mounts and control groups. When the host ends, by whatever cause, so does all this.
"""

# ruff: noqa: PTH106 - pathlib is slow to import, and a launcher must start fast.

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from etude.sandbox import cgroups, inside, isolate, keeper

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 1 << 18  # of a description
SHARED = "/dev/shm"  # noqa: S108 - where hosts keep layers of their own, in folders named after themselves


class Launcher:
    """Forks keepers, waits for them, removes their groups."""

    def __init__(self, host: socket.socket, modules: list[str]) -> None:
        self.host, self.selector = host, selectors.DefaultSelector()
        self.caller = None if isolate.is_privileged() else (os.geteuid(), os.getegid())
        self.parent = cgroups.find()
        if self.parent:
            cgroups.remove_stale(self.parent)
        remove_stale_layers()
        self.live: dict[int, Callable[[], None]] = {}  # by the keeper's pid: what cleans up after it
        self.count = 0
        # What a socket can hold, to send and received, each with as much again for the kernel's own use. A sandbox cannot read this.
        defaults = (cgroups.read(f"/proc/sys/net/core/{name}_default") for name in ("wmem", "rmem"))
        self.socket_memory = 2 * sum(map(int, defaults))
        self.trouble = ""
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - it is told to whoever asks for a sandbox
                self.trouble = f"cannot warm up {module}: {error}"
        gc.freeze()

    def serve(self) -> None:
        """Work until the host has gone."""
        self.selector.register(self.host, selectors.EVENT_READ, self.receive)
        self.selector.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    return
                key.data()

    def receive(self) -> None:
        """Open one sandbox."""
        message, descriptors, _, _ = socket.recv_fds(self.host, MOST_BYTES, 1)
        if not message:
            self.selector.unregister(self.host)  # it is about to end
            return
        try:
            self.open(json.loads(message), descriptors[0])
        except OSError as error:
            self.let_go(descriptors[0], str(error))

    def open(self, description: dict[str, Any], service: int) -> None:
        """Fork a keeper for a sandbox."""
        if self.trouble:
            raise OSError(self.trouble)
        self.count += 1
        group = cgroups.make(self.parent, self.count, description["limits"]) if self.parent else None
        try:
            pid = isolate.clone(isolate.first_namespaces(privileged=self.caller is None))
        except OSError:
            if group:
                group.close()
                os.rmdir(group.folder)
            raise
        if pid == 0:
            keeper.main(description | {"socket_memory": self.socket_memory}, service, group, self.caller)
        if group:
            group.close()
        ended = os.pidfd_open(pid)
        self.live[pid] = partial(self.reap, pid, ended, service, group)
        self.selector.register(ended, selectors.EVENT_READ, self.live[pid])

    def let_go(self, service: int, trouble: str) -> None:
        """Close a sandbox's socket, by which the host knows that it is gone; tell what went wrong."""
        if trouble:
            with contextlib.suppress(OSError):  # the host has gone, or no longer listens
                os.write(service, inside.pack({"error": trouble}))
        os.close(service)

    def reap(self, pid: int, ended: int, service: int, group: cgroups.Group | None) -> None:
        """Clean up after a keeper."""
        del self.live[pid]
        self.selector.unregister(ended)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        trouble = f"its keeper ended with {code}" if code else ""
        try:
            if group:
                os.rmdir(group.folder)
        except OSError as error:
            trouble = f"a control group stays behind: {error}"
        self.let_go(service, trouble)

    def end(self) -> None:
        """End all sandboxes."""
        for pid in self.live:
            os.kill(pid, signal.SIGKILL)
        for reap in list(self.live.values()):
            reap()
        remove_stale_layers()


def remove_stale_layers() -> None:
    """Remove what hosts that are dead have left in shared memory."""
    for folder in cgroups.stale(SHARED):
        shutil.rmtree(folder, ignore_errors=True)  # it may be another user's, or another launcher be at it


def main() -> None:
    """Serve the host at descriptor 0 until it goes."""
    os.umask(0o022)
    host = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    launcher = Launcher(host, sys.argv[1:])
    try:
        launcher.serve()
    finally:
        launcher.end()
