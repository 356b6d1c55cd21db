"""Make the corpus of sprout: Python sources and documentation of permissively licensed PyPI packages.

Archives are found and fetched with pip's own index client, and only ever read as archives: no setup.py, no build
backend and no package code runs. An sdist is preferred because it holds the tests and the documentation; a package
without one gives its wheel. Every package refused and every file dropped is counted by reason in sources.json.

    python corpus.py            reads packages.txt; writes downloads/, documents.jsonl and sources.json
"""
import hashlib
import json
import random
import re
import tarfile
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path

from pip._internal.commands import create_command

HERE = Path(__file__).parent
DOWNLOADS = HERE / "downloads"
MAX_ARCHIVE_BYTES = 80_000_000
MAX_FILE_BYTES = 200_000
MAX_MEAN_LINE = 200  # characters; above it a file is minified or generated
MAX_DIGIT_SHARE = 0.2  # above it a file is a table of numbers
MAX_NON_ASCII_SHARE = 0.1  # above it a file is locale data or translated prose
MAX_PACKAGE_BYTES = 1_000_000  # so that no package dominates
TEXT_SUFFIXES = (".py", ".md", ".rst")
VENDOR_FOLDERS = {"_vendor", "vendor", "_vendored", "vendored", "third_party", "extern", "externals", "node_modules"}
COPYLEFT_HEADER = re.compile(r"GNU (Lesser |Affero |Library )?General Public|Mozilla Public License|GPL-[23]", re.I)

PERMISSIVE_SPDX = re.compile(r"(MIT|MIT-0|(0)?BSD|BSD-[\w-]+|Apache-2\.0|ISC|PSF-2\.0|Python-2\.0(\.1)?)")
PERMISSIVE_CLASSIFIER = re.compile(
    r"OSI Approved :: (MIT( No Attribution)? License|BSD License|Apache Software License|ISC License( \(ISCL\))?"
    r"|Python Software Foundation License)")
PERMISSIVE_NAMES = {"mit", "bsd", "apache", "isc", "psf"}
LICENCE_FILLERS = {"the", "license", "licence", "software", "foundation", "version", "v", "new", "clause", "style"}


def read_package_list():
    """[(split, name)] in the order of packages.txt, held-out first."""
    rows = [line.split() for line in (HERE / "packages.txt").read_text().splitlines() if not line.startswith("#")]
    return [(row[0], name) for row in rows if row for name in row[1:]]


def choose_link(finder, name):
    """The newest stable release of `name`: (version, link), an sdist if there is one, else the first wheel."""
    stable = [c for c in finder.find_all_candidates(name) if not c.version.is_prerelease and not c.link.is_yanked]
    if not stable:
        raise LookupError("no stable release")
    newest = max(candidate.version for candidate in stable)
    links = [candidate.link for candidate in stable if candidate.version == newest]
    return str(newest), min(links, key=lambda link: (link.is_wheel, not link.filename.endswith(".tar.gz"), link.filename))


def fetch(session, link):
    """Download `link` once; returns the path of the archive, its sha256 checked against the index."""
    target = DOWNLOADS / link.filename
    if not target.exists():
        response = session.get(link.url.split("#")[0], stream=True)
        response.raise_for_status()
        content = bytearray()
        for chunk in response.iter_content(1 << 20):
            content += chunk
            if len(content) > MAX_ARCHIVE_BYTES:
                raise ValueError("archive too large")
        if link.hash_name == "sha256" and hashlib.sha256(content).hexdigest() != link.hash:
            raise ValueError("sha256 differs from the index")
        target.write_bytes(content)
    return target


def download_all(wanted):
    """{name: (version, path) or the reason there is none}."""
    DOWNLOADS.mkdir(exist_ok=True)
    command = create_command("download")
    options, _ = command.parse_args([])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)

        def download(name):
            try:
                version, link = choose_link(finder, name)
                return version, fetch(session, link)
            except Exception as error:  # a missing package must not stop the others: it is reported
                return f"{type(error).__name__}: {error}"

        names = [name for _, name in wanted]
        with ThreadPoolExecutor(6) as pool:
            return dict(zip(names, pool.map(download, names)))


def archive_files(path):
    """Yield (path inside the archive, size, read function) of the regular files of an sdist or a wheel."""
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, info.file_size, lambda info=info: archive.read(info)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile():
                    yield member.name, member.size, lambda member=member: archive.extractfile(member).read()


def read_metadata(path):
    """Headers of the shallowest PKG-INFO (sdist) or METADATA (wheel)."""
    best_depth, best = 99, None
    for name, _, read in archive_files(path):
        if name.endswith("/PKG-INFO") or name.endswith(".dist-info/METADATA"):
            if name.count("/") < best_depth:
                best_depth, best = name.count("/"), read()
    return HeaderParser().parsestr((best or b"").decode("utf-8", "replace"))


def spdx_is_permissive(expression):
    """A OR B needs one permissive side, A AND B both; with brackets, all parts must be permissive."""
    sides = re.split(r" OR | AND ", re.sub(r"[()]", "", expression)) if "(" in expression else expression.split(" OR ")
    verdicts = [all(PERMISSIVE_SPDX.fullmatch(part.strip()) for part in side.split(" AND ")) for side in sides]
    return all(verdicts) if "(" in expression else any(verdicts)


def free_text_is_permissive(stated):
    """Only the name of a permissive licence and filler words, such as "Apache License 2.0"."""
    words = set(re.findall(r"[a-z]+", stated.lower()))
    return bool(words & PERMISSIVE_NAMES) and words <= PERMISSIVE_NAMES | LICENCE_FILLERS


def judge_licence(metadata):
    """(licence as stated, is it permissive); the strongest statement decides: SPDX, then classifiers, then free text."""
    expression = metadata.get("License-Expression")
    if expression:
        return expression, spdx_is_permissive(expression)
    classifiers = [c.removeprefix("License :: ") for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    if classifiers:
        return "; ".join(classifiers), all(PERMISSIVE_CLASSIFIER.fullmatch(c) for c in classifiers)
    stated = (metadata.get("License") or "none stated").strip().splitlines()[0][:80]
    return stated, free_text_is_permissive(stated)


def reason_to_drop(text):
    """Why the text is no good to learn from, or None."""
    if not text.strip():
        return "empty"
    if len(text) / (text.count("\n") + 1) > MAX_MEAN_LINE:
        return "minified or generated"
    if COPYLEFT_HEADER.search(text[:3000]):
        return "copyleft header"
    if sum(map(text.count, "0123456789")) > MAX_DIGIT_SHARE * len(text):
        return "numbers"
    if len(text.encode()) - len(text) > MAX_NON_ASCII_SHARE * len(text):
        return "not ASCII"
    return None


def read_text(name, size, read, seen, drops):
    """The text of one archive member, or None with the reason counted in `drops`."""
    if VENDOR_FOLDERS & set(name.split("/")[:-1]):
        reason = "vendored"
    elif size > MAX_FILE_BYTES:
        reason = "over 200 kB"
    else:
        content = read()
        digest = hashlib.sha256(content).digest()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            text, reason = "", "not UTF-8"
        else:
            reason = reason_to_drop(text) or ("duplicate" if digest in seen else None)
        seen.add(digest)
        if reason is None:
            return text
    drops[reason] += 1
    return None


def package_documents(path, seen, drops):
    """[(path inside the archive, text)] of one archive, in a deterministic shuffled order, up to the package's cap."""
    texts = [(name, read_text(name, size, read, seen, drops))
             for name, size, read in archive_files(path) if name.endswith(TEXT_SUFFIXES)]
    documents = sorted((name, text) for name, text in texts if text is not None)
    random.Random(path.name).shuffle(documents)
    kept, room = [], MAX_PACKAGE_BYTES
    for name, text in documents:
        size = len(text.encode())
        if size > room:
            drops["over the package's share"] += 1
            continue
        room -= size
        kept.append((name, text))
    return kept


def main():
    wanted = read_package_list()
    archives = download_all(wanted)
    seen, drops = set(), Counter()
    packages, refused = [], []
    with open(HERE / "documents.jsonl", "w") as out:
        for split, name in wanted:
            if isinstance(archives[name], str):
                refused.append({"name": name, "reason": archives[name]})
                continue
            version, path = archives[name]
            licence, permissive = judge_licence(read_metadata(path))
            if not permissive:
                refused.append({"name": name, "reason": "licence", "licence": licence})
                continue
            documents = package_documents(path, seen, drops)
            for inner_path, text in documents:
                out.write(json.dumps({"package": name, "split": split, "path": inner_path, "text": text}) + "\n")
            packages.append({
                "name": name, "version": version, "licence": licence, "archive": path.name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "files": len(documents), "bytes": sum(len(text.encode()) for _, text in documents), "split": split})
    totals = {split: {key: sum(p[key] for p in packages if p["split"] == split) for key in ("files", "bytes")}
              | {"packages": sum(p["split"] == split for p in packages)} for split in ("train", "heldout")}
    summary = {"totals": totals, "files_dropped": dict(drops), "refused": refused, "packages": packages}
    (HERE / "sources.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps({"totals": totals, "files_dropped": drops, "refused": len(refused)}, indent=1))


if __name__ == "__main__":
    main()
