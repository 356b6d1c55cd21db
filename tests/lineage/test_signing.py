from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

from etude.errors import UserError
from etude.lineage import signing
from etude.progress import Reporter
from tests.lineage.refusals import one_line

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=8)  # fmt: skip


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "deep/down/key.pem"
    signing.make_key(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "release"
    (made / "LICENSES/base").mkdir(parents=True)
    (made / "LICENSES/base/LICENSE").write_text("do as you like")
    (made / "weights.bin").write_bytes(bytes(range(256)) * 9000)
    (made / "ein Name.txt").write_text("")
    return made


def says_the_standard(folder: Path) -> subprocess.CompletedProcess[str]:
    """What the program of model-signing says of a folder."""
    words = [
        "verify",
        "key",
        folder,
        "--signature",
        folder / signing.SIGNATURE,
        "--public_key",
        folder / signing.PUBLIC_KEY,
    ]
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_a_key_is_for_its_owner_alone_and_is_never_replaced(key: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    signing.make_key(key)
    assert key.read_bytes() == before
    assert [path.name for path in key.parent.iterdir()] == ["key.pem"]


def test_the_own_key_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = signing.default_key()
    assert made.is_relative_to(tmp_path / ".config/etude")
    before = signing.public_pem(made)
    assert signing.public_pem(signing.default_key()) == before


def test_a_home_that_takes_no_key_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=one_line("cannot be made", "--key")):
        signing.default_key()
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links here")))
    with pytest.raises(PermissionError):
        signing.make_key(tmp_path / "keys/key.pem")
    assert list((tmp_path / "keys").iterdir()) == [], "half a key is a private key that lies about"


def test_a_folder_signed_by_us_is_good_for_the_standard_and_for_us(folder: Path, key: Path, quiet: Reporter) -> None:
    signing.sign_folder(folder, key)
    signed = signing.signed_files(folder, signing.public_pem(key))
    assert signed == signing.folder_digests(folder, quiet)
    assert set(signed) == {"LICENSES/base/LICENSE", "weights.bin", "ein Name.txt", "model.sig.pub"}
    said = says_the_standard(folder)
    assert said.returncode == 0, said.stderr
    shutil.move(folder, folder.with_name("moved"))
    assert says_the_standard(folder.with_name("moved")).returncode == 0


@pytest.mark.parametrize("damage", ["byte", "missing", "extra", "link to a folder", "link to nothing"])
def test_both_see_every_damage(folder: Path, key: Path, quiet: Reporter, damage: str) -> None:
    signing.sign_folder(folder, key)
    if damage == "byte":
        (folder / "weights.bin").write_bytes(bytes(range(255, -1, -1)) * 9000)
    elif damage == "missing":
        (folder / "LICENSES/base/LICENSE").unlink()
    elif damage.startswith("link"):  # what lies behind it can be anything, such as further chat templates
        (folder / "templates").symlink_to(folder.parent if damage == "link to a folder" else "nothing")
    else:
        (folder / "LICENSES/more.txt").write_text("me too")
    assert signing.signed_files(folder, signing.public_pem(key)) != signing.folder_digests(folder, quiet)
    assert says_the_standard(folder).returncode != 0


def test_what_git_adds_is_not_part_of_a_release(folder: Path, key: Path, quiet: Reporter) -> None:
    signing.sign_folder(folder, key)
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("")
    (folder / ".gitattributes").write_text("*.bin filter=lfs")
    assert signing.signed_files(folder, signing.public_pem(key)) == signing.folder_digests(folder, quiet)
    assert says_the_standard(folder).returncode == 0


@given(statement=st.dictionaries(st.text(), JSON))
def test_a_sealed_statement_opens_for_us_and_for_securesystemslib(key: Path, statement: dict[str, object]) -> None:
    pem = signing.public_pem(key)
    envelope = json.loads(json.dumps(signing.seal(statement, key)))
    assert signing.unseal(envelope, pem) == statement
    loaded = serialization.load_pem_public_key(pem)
    theirs = SSlibKey.from_crypto(loaded, keyid=signing.fingerprint(pem))
    Envelope.from_dict(envelope).verify([theirs], 1)


@given(st.data())
def test_a_seal_breaks_when_anything_in_it_changes(key: Path, data: st.DataObject) -> None:
    pem = signing.public_pem(key)
    envelope = signing.seal({"stage": "cpt", "tokens": 10}, key)
    field = data.draw(st.sampled_from(["payload", "payloadType", "sig"]))
    holder = envelope["signatures"][0] if field == "sig" else envelope
    # Not the padding, whose last bits carry nothing. A signature is another one each time, and not always as long.
    at = data.draw(st.integers(0, 10_000)) % (len(holder[field]) - 3)
    letters = [letter for letter in "ABab" if letter != holder[field][at]]
    other = letters[data.draw(st.integers(0, 3)) % len(letters)]
    holder[field] = holder[field][:at] + other + holder[field][at + 1 :]
    with pytest.raises(signing.BadSignatureError):
        signing.unseal(envelope, pem)
    loaded = serialization.load_pem_public_key(pem)
    theirs = SSlibKey.from_crypto(loaded, keyid=signing.fingerprint(pem))
    with pytest.raises((VerificationError, ValueError)):
        Envelope.from_dict(envelope).verify([theirs], 1)


@pytest.mark.parametrize("broken", [{}, {"payload": 3}, {"payload": "AAAA", "payloadType": "x", "signatures": []}])
def test_what_is_no_envelope_is_not_signed(key: Path, broken: dict[str, object]) -> None:
    with pytest.raises(signing.BadSignatureError):
        signing.unseal(broken, signing.public_pem(key))


def test_another_key_opens_nothing(folder: Path, key: Path, tmp_path: Path) -> None:
    signing.make_key(tmp_path / "other.pem")
    signing.sign_folder(folder, key)
    with pytest.raises(signing.BadSignatureError):
        signing.signed_files(folder, signing.public_pem(tmp_path / "other.pem"))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"dsseEnvelope": null}', "\x00", "[" * 100_000])
def test_a_signature_that_is_none(folder: Path, key: Path, text: str) -> None:
    (folder / signing.SIGNATURE).write_text(text)
    with pytest.raises(signing.BadSignatureError):
        signing.signed_files(folder, signing.public_pem(key))


def pem_of(private: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, password: bytes = b"") -> bytes:
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


def of_unknown_curve(private: ec.EllipticCurvePrivateKey, *, public: bool) -> bytes:
    """Return a key in PEM that names a curve which no library has any more."""
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    der = (
        private.public_key().public_bytes(serialization.Encoding.DER, signing.PUBLIC_FORM[1])
        if public
        else private.private_bytes(serialization.Encoding.DER, *plain)
    )
    name, kind = bytes.fromhex("2a8648ce3d030107"), b"PUBLIC KEY" if public else b"PRIVATE KEY"
    assert name in der
    text = base64.encodebytes(der.replace(name, bytes.fromhex("2a8648ce3d030102")))
    return b"-----BEGIN %b-----\n%b-----END %b-----\n" % (kind, text, kind)


def test_keys_that_cannot_sign_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(UserError, match=one_line(path, "does not exist", "--key")):
        signing.public_pem(path)
    wrong = [b"not a key", pem_of(ed25519.Ed25519PrivateKey.generate()), pem_of(ec.generate_private_key(ec.SECP384R1())),
             pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret")]  # fmt: skip
    for pem in wrong:
        path.write_bytes(pem)
        with pytest.raises(UserError, match=one_line(path)):
            signing.public_pem(path)
    unknown = [of_unknown_curve(ec.generate_private_key(ec.SECP256R1()), public=public) for public in (False, True)]
    path.write_bytes(unknown[0])
    with pytest.raises(UserError, match=one_line(path)):
        signing.public_pem(path)
    for pem in (b"", b"-----BEGIN PUBLIC KEY-----", unknown[1]):
        with pytest.raises(UserError, match=one_line("public key", "owner")):
            signing.fingerprint(pem)
