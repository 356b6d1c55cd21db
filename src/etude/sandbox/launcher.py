"""The small process that every sandbox of a host process is forked from. Standard library only; one thread.

The host is large and has threads: forking it is slow and unsafe. This one is small, or *warm*: it has imported the modules a
task's test run needs, by the task's own Python, and what is forked from it has them in memory. It runs nothing of a model.

The host passes two descriptors for each sandbox: the socket its keeper is to serve, and a pipe. What goes wrong is written to the
pipe; when it is closed, the sandbox is gone: its processes, mounts and control groups. When the host ends, by whatever cause,
so does all this.
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
from typing import Any

from etude.sandbox import cgroups, isolate, keeper

MOST_BYTES = 1 << 16
FROZEN = "/dev/shm"  # noqa: S108 - where hosts keep the layers of forks, in folders named after themselves


class Launcher:
    """Forks keepers, waits for them, removes their groups."""

    def __init__(self, host: socket.socket, modules: list[str]) -> None:
        self.host = host
        self.caller = None if isolate.is_privileged() else (os.geteuid(), os.getegid())
        self.parent = cgroups.find()
        if self.parent:
            cgroups.remove_stale(self.parent)
        remove_stale_forks()
        self.live: dict[int, tuple[int, cgroups.Group | None]] = {}  # by the keeper's pid: the pipe, the group
        self.count = 0
        self.trouble = ""
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - it is told to whoever asks for a sandbox
                self.trouble = f"cannot warm up {module}: {error}"
        gc.freeze()

    def serve(self) -> None:
        """Work until the host has gone."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        parent = os.pidfd_open(os.getppid())
        for source in (self.host.fileno(), woken, parent):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, MOST_BYTES)
                self.reap()
            if parent in ready:
                return
            if self.host.fileno() in ready and not self.receive():
                selector.unregister(self.host)  # it is about to end

    def receive(self) -> bool:
        """Open one sandbox; False: the host has gone."""
        message, descriptors, _, _ = socket.recv_fds(self.host, MOST_BYTES, 2)
        if not message:
            return False
        service, ended = descriptors
        try:
            self.open(json.loads(message), service, ended)
        except OSError as error:
            self.refuse(ended, str(error))
        os.close(service)
        return True

    def open(self, request: dict[str, Any], service: int, ended: int) -> None:
        """Fork a keeper for a sandbox."""
        if self.trouble:
            self.refuse(ended, self.trouble)
            return
        self.count += 1
        group = cgroups.make(self.parent, self.count, request["limits"]) if self.parent else None
        try:
            pid = isolate.clone(isolate.first_namespaces(privileged=self.caller is None))
        except OSError:
            if group:
                group.close()
                os.rmdir(group.folder)
            raise
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keeper.main(service, group, self.caller)
        if group:
            group.close()
        self.live[pid] = ended, group

    def refuse(self, ended: int, why: str) -> None:
        """Tell the host why there is no sandbox."""
        with contextlib.suppress(BrokenPipeError):  # the host has gone
            os.write(ended, why.encode(errors="replace")[:4096])
        os.close(ended)

    def reap(self, *, wait: bool = False) -> None:
        """Clean up after the keepers that have ended."""
        while self.live:
            pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            if pid == 0:
                return
            ended, group = self.live.pop(pid)
            trouble = f"its keeper ended with {os.waitstatus_to_exitcode(status)}" if status else ""
            try:
                if group:
                    os.rmdir(group.folder)
            except OSError as error:
                trouble = f"a control group stays behind: {error}"
            self.refuse(ended, trouble)

    def end(self) -> None:
        """End all sandboxes."""
        for pid in self.live:
            os.kill(pid, signal.SIGKILL)
        self.reap(wait=True)
        remove_stale_forks()


def remove_stale_forks() -> None:
    """Remove what hosts that are dead have left of forks."""
    for folder in cgroups.stale(FROZEN):
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
