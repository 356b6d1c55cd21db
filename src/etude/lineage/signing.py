"""Signatures with a local key, offline: one over the whole release folder, one over what each stage says of itself.

The folder is signed as the OpenSSF Model Signing specification has it (a sigstore bundle that lists every file by digest), by
the library `model-signing`; its own program verifies it, too. Each stage is an in-toto statement with SLSA provenance (these weights
came from those inputs, under these settings) in a DSSE envelope of the same key. There is no predicate for training in in-toto's list;
provenance says it all if a kind of stage is taken as a build type. Inputs that are not one file are named by digests of ours, whose
algorithm stands in docs/records.md: `etudeModel` and `etudeData`.

Both are opened here and not by that library: it says "Signature mismatch" and a list, we say what happened to which file.
A signature proves that whoever holds the key made the folder. Who that is, a buyer must learn in another way: compare the
key's fingerprint with the one its owner publishes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from etude.errors import UserError, one_line
from etude.files import canonical_json, files_below, read_json, sha256_files
from etude.lineage.record import FileDigest, Lineage, Record, manifest_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from etude.progress import Reporter

SIGNATURE = "model.sig"
PUBLIC_KEY = "model.sig.pub"
GIT_FILES = {".git", ".gitattributes", ".github", ".gitignore"}  # at the top; not signed, as the specification has it
PUBLIC_FORM = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
HOW = ec.ECDSA(hashes.SHA256())
STATEMENT_TYPE = "application/vnd.in-toto+json"
NO_DIGEST = ""


class BadSignatureError(Exception):
    """The text was not signed by this key, or was changed after it."""


def default_key() -> Path:
    """Return the user's own key, which is made at the first release."""
    try:
        path = Path.home() / ".config/etude/release-key.pem"
        if not path.exists():
            make_key(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
        raise UserError(f"a key of your own cannot be made: {one_line(error)}; give one with --key") from None
    return path


def make_key(path: Path) -> None:
    """Make a private key that only its owner can read; of two processes that try at once, the first wins."""
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(*form)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def public_pem(key: Path) -> bytes:
    """Return the public half of a private key."""
    return _private(key).public_key().public_bytes(*PUBLIC_FORM)


def fingerprint(pem: bytes) -> str:
    """Return what people compare keys by; `model-signing` names keys the same way."""
    return hashlib.sha256(_public(pem).public_bytes(*PUBLIC_FORM)).hexdigest()


def _private(key: Path) -> ec.EllipticCurvePrivateKey:
    try:
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    except FileNotFoundError:
        raise UserError(f"the key {key} does not exist; leave --key out to use your own, made when needed") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise UserError(f"{key} is not a private key that can be used: {one_line(error)}; give a PEM file") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or not isinstance(loaded.curve, ec.SECP256R1):
        raise UserError(f"{key} is not an elliptic-curve key on P-256; make one, or leave --key out")
    return loaded


def _public(pem: bytes) -> ec.EllipticCurvePublicKey:
    try:
        loaded = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise UserError("the public key is not one; give the PEM file that its owner published") from None
    if not isinstance(loaded, ec.EllipticCurvePublicKey) or not isinstance(loaded.curve, ec.SECP256R1):
        raise UserError("the public key is not on the elliptic curve P-256; give the one its owner published")
    return loaded


def seal(statement: dict[str, Any], key: Path) -> dict[str, Any]:
    """Return a statement in a signed DSSE envelope."""
    payload = canonical_json(statement).encode()
    signature = _private(key).sign(_before_signing(STATEMENT_TYPE, payload), HOW)
    signed = {"keyid": fingerprint(public_pem(key)), "sig": base64.b64encode(signature).decode()}
    return {"payload": base64.b64encode(payload).decode(), "payloadType": STATEMENT_TYPE, "signatures": [signed]}


def unseal(envelope: dict[str, Any], pem: bytes) -> Any:
    """Return what a DSSE envelope holds, if it was signed with the key whose public half is `pem`."""
    try:
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        signed = _before_signing(str(envelope["payloadType"]), payload)
        _public(pem).verify(signature, signed, HOW)
        return json.loads(payload)
    except (InvalidSignature, KeyError, IndexError, TypeError, ValueError, binascii.Error, RecursionError) as error:
        raise BadSignatureError(one_line(error)) from None


def _before_signing(kind: str, payload: bytes) -> bytes:
    """Return what DSSE signs: the type is signed with the text, so that one cannot be taken for another."""
    return b"DSSEv1 %d %b %d %b" % (len(kind.encode()), kind.encode(), len(payload), payload)


def sign_folder(folder: Path, key: Path) -> None:
    """Sign every file of a folder; the public key goes in first and is signed with the rest."""
    from model_signing import hashing, signing

    (folder / PUBLIC_KEY).write_bytes(public_pem(key))
    files = hashing.Config().set_ignored_paths(paths=[SIGNATURE])
    signer = signing.Config().use_elliptic_key_signer(private_key=key)
    signer.set_hashing_config(files).sign(folder, folder / SIGNATURE)


def signed_files(folder: Path, pem: bytes) -> dict[str, str]:
    """Return the digests of all files as they were signed, by path. Raises BadSignatureError."""
    try:
        statement = unseal(read_json(folder / SIGNATURE)["dsseEnvelope"], pem)
        resources = statement["predicate"]["resources"]
        return {str(each["name"]): str(each["digest"]) for each in resources if each["algorithm"] == "sha256"}
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadSignatureError(one_line(error)) from None


def folder_digests(folder: Path, reporter: Reporter) -> dict[str, str]:
    """Hash every file of a folder but the signature and git's own.

    What is neither a file nor a folder, as a link to a folder, has `NO_DIGEST`: no signature covers what lies behind it.
    """
    odd = [path for path in folder.rglob("*") if not path.is_file() and (path.is_symlink() or not path.is_dir())]
    paths = [(path.relative_to(folder), path) for path in [*files_below(folder), *odd]]
    signed = {name.as_posix(): path for name, path in paths if name.parts[0] not in {SIGNATURE, *GIT_FILES}}
    size = sum(path.stat().st_size for path in signed.values() if path not in odd)
    with reporter.task("hashing", size, "B") as task:
        digests = sha256_files([path for path in signed.values() if path not in odd], task.advance)
    return {name: digests.get(path, NO_DIGEST) for name, path in signed.items()}


PREDICATE_TYPE = "https://slsa.dev/provenance/v1"


def statement(record: Record, lineage: Lineage) -> dict[str, Any]:
    """Return the statement about one stage of a lineage, ready to be signed."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": _files(record.weights or manifest_of(record)),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"urn:etude:stage:{record.kind}:{record.kind_version}",
                "externalParameters": {"stage": record.stage, "settings": record.recipe.stage},
                "internalParameters": {
                    "recipe": record.recipe.hash, "fingerprint": record.fingerprint, "seeds": record.seeds,
                    "packages": record.packages,
                },
                "resolvedDependencies": _dependencies(record, lineage),
            },
            "runDetails": {
                "builder": {"id": "urn:etude:local", "version": {"etude": record.code.etude}},
                "metadata": {"invocationId": record.id, "startedOn": record.started, "finishedOn": record.finished},
                "byproducts": [
                    {"name": "record", "digest": {"etudeRecord": record.id}},
                    {"name": "compute", "annotations": record.compute.model_dump(mode="json")},
                    {"name": "hardware", "annotations": record.hardware.model_dump(mode="json")},
                    *_files(record.outputs),
                ],
            },
        },
    }  # fmt: skip


def statement_errors(document: Mapping[str, Any]) -> list[str]:
    """Return what in-toto's own types and checks find wrong, at most one line."""
    from google.protobuf.json_format import ParseDict, ParseError
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message

    try:
        Statement.copy_from_pb(ParseDict(dict(document), Message())).validate()
        if document.get("predicateType") == PREDICATE_TYPE:
            ParseDict(document["predicate"], Provenance())
    except (ParseError, ValueError) as error:
        return [str(error).splitlines()[0]]
    return []


def _dependencies(record: Record, lineage: Lineage) -> list[dict[str, Any]]:
    """Return what went in: parents by the files of their weights, data, and the program."""
    inputs: list[dict[str, Any]] = []
    for edge in record.parents:
        about = {"role": edge.role, "record": edge.record, "etudeModel": edge.model_digest}
        above = lineage.records.get(edge.record or "")
        files = _files(above.weights, f"{edge.name}/") if above else []
        files = files or [{"name": edge.name, "digest": {"etudeModel": edge.model_digest}}]
        inputs += [file | {"annotations": about} for file in files]
    for use in record.data:
        counts = use.model_dump(include={"source", "revision", "files", "licences"})
        inputs.append({"name": use.name, "digest": {"etudeData": use.digest}, "annotations": counts})
    if record.corpus:
        files = _files(manifest_of(lineage.records[record.corpus]), "corpus/")
        inputs += [file | {"annotations": {"role": "corpus", "record": record.corpus}} for file in files]
    if record.origin:
        inputs += _files(record.origin.received, f"{record.origin.name}/")
    commit = {"digest": {"gitCommit": record.code.revision}} if record.code.revision else {}
    return [*inputs, {"name": "etude", **commit, "annotations": record.code.model_dump(mode="json")}]


def _files(files: Mapping[str, FileDigest], prefix: str = "") -> list[dict[str, Any]]:
    return [{"name": prefix + name, "digest": {"sha256": file.sha256}} for name, file in sorted(files.items())]
