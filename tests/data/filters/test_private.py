"""Planted secrets are put together at run time, so that no scanner takes this file for a leak."""

from __future__ import annotations

import base64
import random
import string
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.document import Document
from etude.data.filters.private import EMAIL, IPV4, IPV6, SECRET, scrub, without_addresses, without_secrets
from etude.errors import UserError

RNG = random.Random(5)


def made_up(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(RNG.choice(alphabet) for _ in range(length))


GITHUB = "gh" + "p_" + made_up(36)
OTHER_GITHUB = "gh" + "p_" + made_up(36)
AWS_ID, AWS_SECRET = "AK" + "IA" + made_up(16, string.ascii_uppercase + "234567"), made_up(40)
STRIPE = "sk_" + "live_" + made_up(24)
PASSWORD = made_up(9)
BEGIN, END = (f"-----{word} RSA PRIVATE" + " KEY-----" for word in ("BEGIN", "END"))
KEY = "\n".join([BEGIN, *(made_up(64) for _ in range(12)), END])


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def documents(*texts: str) -> list[Document]:
    return [Document("repository", f"{number}.py", text) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def scrubbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Counter[str]]:
    """One run of the detector over everything that is planted."""
    texts = {
        "token": f'TOKEN = "{GITHUB}"\nagain = "{GITHUB}"\n',
        "ignored": f'TOKEN = "{GITHUB}"  # kingfisher:ignore gitleaks:allow\n',
        "unicode": f'name = "日本語𝒳é"; token = "{OTHER_GITHUB}"; end = "é"\n\x0c\u2028é = "{GITHUB}"\n',
        "pair": f"aws_access_key_id = {AWS_ID}\naws_secret_access_key = {AWS_SECRET}\nx = '{AWS_SECRET}'\n",
        "key": f'x = 1\nKEY = """{KEY}"""\ny = 2\n',
        "stripe": f"stripe.api_key = '{STRIPE}'\n",
        "url": f'DB = "postgres://admin:{PASSWORD}@db.internal.corp:5432/x"\npasswords = ["{PASSWORD}es"]\n',
        "base64": f'before = 1\nblob = "{encoded(f"token = {GITHUB} and more")}"\nafter = 2\n',
        "clean": 'commit = "3f786850e387550fdab836ed7e6dc881de23001b"\npassword = getpass()\ntoken = "ghp_xxxxxxxxxxxxxxxx"\n',
        "mail": "# Copyright (c) Jane Doe <jane.doe@realcompany.io>\nhost = '93.184.216.34'\n",
        "empty": "",
    }
    batch = documents(*texts.values())
    report = scrub(batch, tmp_path_factory.mktemp("workspace"))
    return dict(zip(texts, (document.text for document in batch), strict=True)) | {"was clean": texts["clean"]}, report


def test_no_secret_is_left(scrubbed: tuple[dict[str, str], Counter[str]]) -> None:
    together = "\n".join(scrubbed[0].values())
    for secret in (
        GITHUB,
        OTHER_GITHUB,
        AWS_ID,
        AWS_SECRET,
        STRIPE,
        *KEY.split("\n")[1:-1],
        encoded(GITHUB)[:30],
    ):
        assert secret not in together


def test_the_text_around_a_secret_stays(scrubbed: tuple[dict[str, str], Counter[str]]) -> None:
    texts, _ = scrubbed
    assert texts["token"] == f'TOKEN = "{SECRET}"\nagain = "{SECRET}"\n'
    assert texts["ignored"] == f'TOKEN = "{SECRET}"  # kingfisher:ignore gitleaks:allow\n'
    assert texts["unicode"] == f'name = "日本語𝒳é"; token = "{SECRET}"; end = "é"\n\x0c\u2028é = "{SECRET}"\n'
    assert texts["pair"] == f"aws_access_key_id = {SECRET}\naws_secret_access_key = {SECRET}\nx = '{SECRET}'\n"
    assert texts["key"] == f'x = 1\nKEY = """{SECRET}"""\ny = 2\n'
    assert texts["base64"] == f"before = 1\n{SECRET}\nafter = 2\n"


def test_a_short_password_goes_at_its_place_only(scrubbed: tuple[dict[str, str], Counter[str]]) -> None:
    expected = f'DB = "postgres://admin:{SECRET}@db.internal.corp:5432/x"\npasswords = ["{PASSWORD}es"]\n'
    assert scrubbed[0]["url"] == expected


def test_what_only_looks_like_a_secret_stays(scrubbed: tuple[dict[str, str], Counter[str]]) -> None:
    assert scrubbed[0]["clean"] == scrubbed[0]["was clean"]


def test_everything_is_counted(scrubbed: tuple[dict[str, str], Counter[str]]) -> None:
    _, report = scrubbed
    assert report["secret: github-pat"] == 6
    assert report["secret: private-key"] == 1
    assert (report["e-mail"], report["IP address"]) == (1, 1)
    assert all(kind in {"e-mail", "IP address"} or kind.startswith("secret: ") for kind in report)


def test_nothing_is_left_in_the_workspace_and_git_ignores_hide_nothing(tmp_path: Path) -> None:
    workspace = tmp_path / ".hidden"
    workspace.mkdir()
    for folder in (tmp_path, workspace):
        for name in (".gitignore", ".ignore"):
            (folder / name).write_text("*\n")
    batch = documents(GITHUB)
    scrub(batch, workspace)
    assert batch[0].text == SECRET
    assert sorted(path.name for path in workspace.iterdir()) == [".gitignore", ".ignore"]


def test_no_text_is_skipped_for_how_it_begins(tmp_path: Path) -> None:
    beginnings = ["%PDF-1.4", "PK\x03\x04", "\x7fELF", "\x1b[0m\x07\x01", "GIF89a", "Rar!\x1a\x07"]
    batch = documents(*(f"{beginning}\ntoken = '{GITHUB}'\n" for beginning in beginnings))
    scrub(batch, tmp_path)
    assert [document.text for document in batch] == [f"{beginning}\ntoken = '{SECRET}'\n" for beginning in beginnings]


def fake_detector(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Put a module in the detector's place whose program does as we say."""
    script = folder / "detector"
    script.write_text(f"#!{sys.executable}\nimport os, sys\nout = sys.argv[-1].partition('=')[2]\n{program}\n")
    script.chmod(0o755)
    (folder / "kingfisher.py").write_text(f"def get_binary_path():\n    return {str(script)!r}\n")
    monkeypatch.delitem(sys.modules, "kingfisher", raising=False)
    monkeypatch.syspath_prepend(folder)


AUDIT = '{"audit": {"repositories": [{"stats": {"blobs_scanned": %d}}]}}'


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('out of memory', file=sys.stderr); sys.exit(1)", "exit code 1, 0 of 2 texts read): out of memory"),
        ("sys.exit(0)", "exit code 0, 0 of 2 texts read"),
        (f"open(out, 'w').write('{AUDIT % 1}'); sys.exit(200)", "exit code 200, 1 of 2 texts read"),
        (f"open(out, 'w').write('{AUDIT % 2}'); sys.exit(101)", "exit code 101, 2 of 2 texts read"),
        (f"open(out, 'w').write('{AUDIT % 2}'); os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_detector_that_fails_or_skips_texts_is_an_error(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_detector(tmp_path, monkeypatch, program)
    with pytest.raises(UserError) as error:
        scrub(documents("one", "two"), tmp_path)
    assert said in str(error.value)


def test_the_detector_gets_no_settings_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINGFISHER_ALERT_REPORT_URL", "https://example.org")
    monkeypatch.setenv("KF_GITHUB_TOKEN", "x")
    seen = tmp_path / "seen"
    program = f"open({str(seen)!r}, 'w').write(' '.join([*os.environ, *sys.argv])); open(out, 'w').write('{AUDIT % 1}')"
    fake_detector(tmp_path, monkeypatch, program)
    scrub(documents("one"), tmp_path)
    words = seen.read_text().split()
    assert "--no-validate" in words
    assert "--no-update-check" in words
    assert not [word for word in words if word.startswith(("KF_", "KINGFISHER_"))]


def test_a_missing_detector_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kingfisher", None)
    with pytest.raises(UserError, match="pip install kingfisher-bin"):
        scrub(documents("one"), tmp_path)


def finding(text: str, secret: str, snippet: str | None = None, **more: Any) -> dict[str, Any]:
    """Return what the detector says of the first place of a secret."""
    before = text[: text.index(secret)]
    column = len(before.rpartition("\n")[2].encode())
    return {"line": before.count("\n") + 1, "column_start": column, "snippet": snippet or secret, **more}


PIECES = st.lists(st.sampled_from(["é", "日", "𝒳", "a", " ", "\n", "\t", "\x0c", "\u2028"]), max_size=20).map("".join)


@given(st.lists(PIECES, min_size=2, max_size=4))
def test_secrets_are_found_by_line_and_byte(pieces: list[str]) -> None:
    secrets = [f"secret-{number}-" + "k" * number for number in range(len(pieces) - 1)]
    text = pieces[0] + "".join(secret + piece for secret, piece in zip(secrets, pieces[1:], strict=True))
    expected = pieces[0] + "".join(SECRET + piece for piece in pieces[1:])
    assert without_secrets(text, [finding(text, secret) for secret in secrets]) == expected


def test_a_finding_that_is_not_in_the_text_takes_its_line() -> None:
    text = "first\nsecond abc third\nlast"
    assert without_secrets(text, [finding(text, "abc", "xyz")]) == f"first\n{SECRET}\nlast"
    assert (
        without_secrets(text, [finding(text, "last", "something long that is not there")])
        == f"first\nsecond abc third\n{SECRET}"
    )
    assert without_secrets(text, [finding(text, "third", "first")]) == f"first\n{SECRET}\nlast", (
        "not where it was said to be"
    )


def test_overlapping_findings() -> None:
    text = "x = 'aaaabbbbcccc'\n"
    found = [finding(text, "bbbbcc"), finding(text, "aaaabbbb"), finding(text, "aaaa")]
    assert without_secrets(text, found) == f"x = '{SECRET}cc'\n"
    assert without_secrets(text, [finding(text, "aabbbbcc"), finding(text, "bbbb")]) == f"x = 'aa{SECRET}cc'\n"


def cleaned(text: str) -> str:
    counts: Counter[str] = Counter()
    result = without_addresses(text, counts)
    assert sum(counts.values()) == (result != text and result.count(EMAIL) + result.count(IPV4) + result.count(IPV6))
    return result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail jane.doe+list@uni-bonn.de now", f"mail {EMAIL} now"),
        ("<joe@mail.co.uk>, joe_2@x.io.", f"<{EMAIL}>, {EMAIL}."),
        ("# Copyright (c) 2020 Joe <JOE@ACME-CORP.COM>", f"# Copyright (c) 2020 Joe <{EMAIL}>"),
        ("mailto:joe@gmail.com", f"mailto:{EMAIL}"),
        ("ping 93.184.216.34", f"ping {IPV4}"),
        ("http://64.111.127.166/x", f"http://{IPV4}/x"),
        ("host = '3.15.148.177'", f"host = '{IPV4}'"),
        ("192.2.2.1-192.2.2.254", f"{IPV4}-{IPV4}"),
        ("[2606:4700:4700::1111]:53", f"[{IPV6}]:53"),
        ("2a02:6b8:7c:40c:c51e:495f:e23a:3 x", f"{IPV6} x"),
        ("a@gmail.com 93.184.216.34 2001:4860:4860::8888", f"{EMAIL} {IPV4} {IPV6}"),
    ],
)
def test_addresses_are_replaced(text: str, expected: str) -> None:
    assert cleaned(text) == expected
    assert cleaned(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "user@example.com, a.b@mail.example.org, x@host.test, root@localhost, foo@bar.com",
        "git@github.com:owner/name.git",
        "git+ssh://git@gitlab.com/x",
        "https://user:password@index.org/simple, ftp://me@files.org/",
        "@foo.bar\n@app.route('/')\n@dataclass\n",
        "import x from '@angular/core'; left-pad@1.3.0; actions/checkout@v4",
        "y = x@self.weight\nz = a@b.T + x@np.eye",
        "icon@2x.png getty@tty1.service",
        "email@example.com",
        "127.0.0.1 10.0.0.1 192.168.1.254 172.16.200.1 169.254.1.200 0.0.0.0 255.255.255.255 224.0.0.251",
        "192.0.2.77 198.51.100.7 203.0.113.99",
        "1.2.3.4 8.8.8.8",
        "version = '93.184.216.34'",
        "__version__: 10.20.30.40",
        "opencv-python==4.8.0.74 chrome/99.0.48.44 v1.2.3.99 jdk-21.0.12.99",
        "1.3.6.1.4.1.311.60.2.1.3 oid:2.5.4.97 1.2.3.400 300.1.2.3 1.2.3.99.5 1.2.3.99rc1 1.2.3.99-beta",
        "spec 21.2.2.126, §17.3.2.36",
        "x[2000::2] y[2001:3000:5] 2024:10:12:33 std::vector ::1 fe80::1 2001:db8::42 12:34:56",
    ],
)
def test_what_only_looks_like_an_address_stays(text: str) -> None:
    assert cleaned(text) == text


@given(st.text(st.sampled_from("a1.@:/-f2 \n"), max_size=60))
def test_scrubbing_twice_changes_nothing_more(text: str) -> None:
    once = without_addresses(text, Counter())
    assert without_addresses(once, Counter()) == once
