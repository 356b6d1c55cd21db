"""Calls of a demonstration said as commands, for agents whose only tool is `bash`."""

from __future__ import annotations

import shlex

from etude.agent.calls import Call

REPLACE = """python - <<'PYTHON'
from pathlib import Path
file = Path({path!r})
text = file.read_text()
old = {old!r}
assert text.count(old) == 1
file.write_text(text.replace(old, {new!r}))
PYTHON"""
WRITE = """python - <<'PYTHON'
from pathlib import Path
Path({path!r}).write_text({content!r})
PYTHON"""


def in_terminal(call: Call) -> Call:
    """Return the call of `bash` that does what a call of `grep`, `read`, `edit`, `write` or `shell` does."""
    given = call.arguments
    if call.name == "grep":
        where = shlex.quote(str(given["path"])) if "path" in given else f"--include={shlex.quote(str(given['glob']))} ."
        command = f"grep -rnE {shlex.quote(str(given['pattern']))} {where}"
    elif call.name == "read":
        command = f"sed -n {given['start']},{given['end']}p {shlex.quote(str(given['path']))}"
    elif call.name == "edit":
        command = REPLACE.format(**given)
    elif call.name == "write":
        command = WRITE.format(**given)
    else:
        assert call.name == "shell", call.name
        command = str(given["command"])
    return Call("bash", {"command": command})
