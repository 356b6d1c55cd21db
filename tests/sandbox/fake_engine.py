"""Docker's and Podman's commands `run`, `exec`, `rm` and `image inspect` in forty lines, for tests: a process namespace, and a folder for /workspace.

It isolates nothing else. Every command line is appended to LOG, a file in the folder named first.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

VALUED = {"--name", "--log-driver", "--pull", "--network", "--hostname", "--user", "--cap-drop", "--cap-add", "--security-opt", "--memory",
          "--memory-swap", "--pids-limit", "--cpus", "--ulimit", "--tmpfs", "--volume", "--workdir", "--env"}  # fmt: skip


def parse(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return options with their values, and the words after them."""
    options = []
    while words and words[0].startswith("-"):
        size = 2 if words[0] in VALUED else 1
        options.append((words[0], words[1] if size == 2 else ""))
        words = words[size:]
    return options, words


def main(state: Path, command: str, *given: str) -> int:
    with (state / "log").open("a") as log:
        log.write(json.dumps([command, *given]) + "\n")
    options, words = parse(list(given))
    inside = [word.replace("/workspace", f"{state}/workspace") for word in words[1:]]
    if command == "run":
        (state / "workspace").mkdir()
        filtering = next(value for _, value in options if value.startswith("seccomp="))
        (state / "profile.json").write_bytes(Path(filtering.removeprefix("seccomp=")).read_bytes())
        inside = [word.replace('"/tmp"', f'"{state}"') for word in inside]
        spaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
        (state / "pid").write_text(str(os.getpid()))
        os.execvp(spaces[0], [*spaces, *inside])
    if command == "image":
        print("sha256:" + hashlib.sha256(given[-1].encode()).hexdigest())  # noqa: T201
        return 0
    first = int(Path(f"/proc/{(state / 'pid').read_text()}/task/{(state / 'pid').read_text()}/children").read_text())
    env = dict(value.split("=", 1) for name, value in options if name == "--env") | {"PATH": os.environ["PATH"]}
    entering = [
        "nsenter",
        "--target",
        str(first),
        "--user",
        "--pid",
        "--mount",
        "--preserve-credentials",
        f"--wd={state}/workspace",
    ]
    code = subprocess.run([*entering, "--", *inside], env=env, check=False).returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
