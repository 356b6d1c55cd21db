"""Programs that tests talk to, a database say: started in the sandbox before each call that runs tests or an agent's command.

What a call starts ends with the call, so a service is started anew for each; its files in /tmp stay. There is no network: it listens
on a socket file, or on 127.0.0.1. It runs as the user that the tests run as, who is not root.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_READY = 97  # how the shell exits


class ServiceSettings(BaseModel, extra="forbid", strict=True, frozen=True):
    """One service."""

    run: str = Field(min_length=1, description="command line that runs it, in the foreground")
    ready: str = Field("true", description="command line that succeeds once it can be used")
    seconds: int = Field(30, ge=1, le=600, description="longest time until it is ready")


def start_lines(services: Sequence[ServiceSettings]) -> str:
    """Return lines for sh that start services one after the other, each when the one before is ready; nothing for none."""
    return "".join(_lines(number, service) for number, service in enumerate(services))


def _lines(number: int, service: ServiceSettings) -> str:
    log, tries = f"/tmp/.service-{number}.log", f"tries_{number}"  # noqa: S108 - in the sandbox
    run, ready = (f"sh -c {shlex.quote(line)}" for line in (service.run, service.ready))
    failed = f"echo {shlex.quote(f'not ready after {service.seconds} s: {service.run}')} >&2; tail -n 20 {log} >&2; exit {NOT_READY}"
    return (
        f"{run} >{log} 2>&1 </dev/null &\n{tries}=0\n"
        f"until {ready} >/dev/null 2>&1 </dev/null; do {tries}=$(({tries}+1))\n"
        f'if [ "${tries}" -gt {10 * service.seconds} ]; then {failed}; fi\nsleep 0.1; done\n'
    )
