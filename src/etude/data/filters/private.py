"""Secrets and personal data are replaced in the text, and counted; the document stays.

Secrets: Kingfisher, a maintained detector with some five hundred rules, as a program over a batch of files, because
starting it takes most of a second. It could ask the services whether a secret still works: we never
let it, and it gets no settings from the environment.

Personal data: e-mail addresses and public IP addresses, by our own patterns. Detectors such as Presidio need language
models and read some hundred kB/s. Names and postal addresses stay (no pattern finds them), and so do telephone numbers:
in code nearly all that looks like one is a version, a date or a constant.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from etude.data.document import Document

SECRET, EMAIL, IPV4, IPV6 = "REDACTED_SECRET", "email@example.com", "192.0.2.1", "2001:db8::1"
UNMISTAKABLE = 12  # a secret this long is replaced wherever it stands; "tiger" in a database URL only at its place
# No validation, updates or ignore comments; every occurrence; plain texts of any size.
OPTIONS = ("--no-validate", "--no-update-check", "--no-ignore", "--no-dedup", "--no-limits", "--no-extract-archives",
           "--git-history=none", "--format=jsonl", "--quiet", "--jobs=1")  # fmt: skip
WENT_WELL = (0, 200, 205)  # exit codes: nothing found; something found, the last for what it thinks is valid
# All it may know of ours: where its compiled rules lie, which take 8 s to make.
ENVIRONMENT = ("HOME", "XDG_CACHE_HOME", "TMPDIR")

# Each search begins with a literal sign, which makes it ten times faster; what stands before it is looked at afterwards.
AT = re.compile(r"@(?<=\w@)((?:[A-Za-z0-9-]+\.)+([A-Za-z]{2,12}))(?![\w-]*[@(])")
LOCAL_PART = re.compile(r"[\w.+%-]{1,64}$", re.ASCII)
TOP_LEVEL = re.compile(r"[a-z]{2}|com|org|net|edu|gov|mil|int|info|biz|name|dev|app|xyz|online|tech|cloud|email", re.I)
NOBODY = re.compile(r"(?i)(?:.*\.)?(?:example|foo|bar|baz|test|domain|acme|company|host|server|localhost|invalid)\.\w+")
NO_HOST = re.compile(r"(?:self|cls|np|jnp|torch|tf|this)\.")  # x@self.to is a product of matrices
LOGIN = re.compile(r"(?:\bgit|://[^\s/@]*)$")  # git@host:path, https://user:password@host
QUAD = re.compile(r"\.(?<=\d\.)\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w.]?\d|\w|-(?!\d+\.))")
IDENTIFIES = r"(?:version|release)[^\n,;)]{0,24}|(?:section|spec\w*|oid|identifier|§)\W{0,4}"
NUMBERED = re.compile(rf"(?:{IDENTIFIES}|[a-z_.][-/]?|[=<>~!]=\s?)$", re.I)
SIX = re.compile(r":(?<=(?<![\w:.])[23][0-9a-f]{3}:)(?:[0-9a-f]{0,4}:){1,6}[0-9a-f]{1,4}(?![\w:])", re.I)  # 2000::/3


def scrub(documents: Sequence[Document], workspace: Path) -> Counter[str]:
    """Replace secrets and personal data in the texts of a batch, in place; `workspace` holds its files meanwhile.

    Return what was replaced, by kind: `e-mail`, `IP address`, `secret: github-pat`, …
    """
    replaced: Counter[str] = Counter()
    findings = _findings(documents, workspace)
    for index, document in enumerate(documents):
        replaced.update(f"secret: {finding['rule']}" for finding in findings[index])
        document.text = without_addresses(without_secrets(document.text, findings[index]), replaced)
    return replaced


def _findings(documents: Sequence[Document], workspace: Path) -> dict[int, list[dict[str, Any]]]:
    """Run the detector over the texts; return its findings by number of the document."""
    with tempfile.TemporaryDirectory(dir=workspace) as folder:
        texts, out = Path(folder, "texts"), Path(folder, "findings.jsonl")
        texts.mkdir()
        for index, document in enumerate(documents):  # after a blank line, or it skips what begins like a PDF or ZIP
            texts.joinpath(str(index)).write_bytes(b"\n" + document.text.encode())
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        command = [_detector(), "scan", str(texts), *OPTIONS, f"--output={out}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
    read = [part["stats"]["blobs_scanned"] for line in lines for part in line.get("audit", {}).get("repositories", [])]
    if done.returncode not in WENT_WELL or read != [len(documents)]:
        what = f"exit code {done.returncode}, {sum(read)} of {len(documents)} texts read"
        raise UserError(f"the secret detector kingfisher failed ({what}): {' '.join(done.stderr.split())[:300]}")
    findings: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if finding := line.get("finding"):
            here = {"rule": line["rule"]["name"], "line": finding["line"] - 1}
            findings[int(Path(finding["path"]).name)].append(finding | here)
    return findings


def _detector() -> str:
    try:
        from kingfisher import get_binary_path  # type: ignore[import-untyped]

        return str(get_binary_path())
    except (ImportError, OSError) as error:
        advice = "`pip install kingfisher-bin`, or set filters.scrub = false for data you have scrubbed"
        raise UserError(f"the secret detector is missing ({error}); install it with {advice}") from None


def without_secrets(text: str, findings: list[dict[str, Any]]) -> str:
    """Replace what the detector found: at its place; long secrets, and the other halves of pairs, everywhere."""
    if not findings:
        return text
    lines = text.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    spans, everywhere = [], set()
    for finding in findings:
        secret, number = finding["snippet"], finding["line"] - 1
        line = lines[number]
        before = line.encode()[: finding["column_start"]]  # it counts in bytes
        start = starts[number] + len(before.decode(errors="ignore"))
        if text.startswith(secret, start):
            spans.append((start, start + len(secret), SECRET))
        elif len(secret) < UNMISTAKABLE or secret not in text:  # it decoded it, or changed it: then the line has to go
            spans.append((starts[number], starts[number] + len(line), SECRET))
        halves = (secret, *finding.get("dependent_captures", {}).values())
        everywhere |= {half for half in halves if len(half) >= UNMISTAKABLE}
    scrubbed = _replaced(text, spans)
    for secret in sorted(everywhere, key=lambda half: (-len(half), half)):
        scrubbed = scrubbed.replace(secret, SECRET)
    return scrubbed


def without_addresses(text: str, replaced: Counter[str]) -> str:
    """Replace e-mail and public IP addresses; count them."""
    mails = [(*span, EMAIL) for at in AT.finditer(text) if (span := _email(text, at))]
    addresses = [(*span, IPV4) for dot in QUAD.finditer(text) if (span := _quad(text, dot))]
    addresses += [(*span, IPV6) for colon in SIX.finditer(text) if (span := _six(text, colon))]
    replaced.update(["e-mail"] * len(mails) + ["IP address"] * len(addresses))
    return _replaced(text, mails + addresses) if mails or addresses else text


def _replaced(text: str, spans: list[tuple[int, int, str]]) -> str:
    """Return a text with other words in some places; of places that overlap, the first counts, for all that they cover."""
    pieces, position = [], 0
    for start, end, instead in sorted(spans):
        if start >= position:
            pieces += [text[position:start], instead]
        position = max(position, end)
    return "".join([*pieces, text[position:]])


def _email(text: str, at: re.Match[str]) -> tuple[int, int] | None:
    """Return where the address lies whose @ this is; None if it is nobody's, or no address at all."""
    before = text[max(0, at.start() - 200) : at.start()]
    local = LOCAL_PART.search(before)
    nobody = NOBODY.match(at[1]) or NO_HOST.match(at[1]) or LOGIN.search(before)
    if not local or nobody or not TOP_LEVEL.fullmatch(at[2]):
        return None
    return at.start() - len(local[0]), at.end()


def _quad(text: str, dot: re.Match[str]) -> tuple[int, int] | None:
    """Return where the public address lies whose first dot this is; None for versions, section numbers and object ids."""
    start = dot.start() - len(re.findall(r"\d+$", text[max(0, dot.start() - 4) : dot.start()])[0])
    address = text[start : dot.end()]
    small = max(map(int, address.split("."))) < 30  # 1.2.3.4, 8.8.8.8: numbers, examples, or everybody's
    if small or not _public(address) or NUMBERED.search(text[max(0, start - 40) : start]):
        return None
    return start, dot.end()


def _six(text: str, colon: re.Match[str]) -> tuple[int, int] | None:
    """Return where the public address lies whose first colon this is; None for slices such as [2000::2]."""
    address = text[colon.start() - 4 : colon.end()]
    return (colon.start() - 4, colon.end()) if _public(address) and len(re.findall(r"\w+", address)) > 2 else None


def _public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_global and not parsed.is_multicast
