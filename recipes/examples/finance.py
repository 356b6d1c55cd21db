"""Make the data of finance.toml: annual reports of companies that do not exist, as XBRL-like facts, and questions about them.

    python recipes/examples/finance.py [FOLDER]        default build/finance; the same bytes every time

    filings.jsonl   text of the reports of the training companies, for continued pretraining
    facts.jsonl     all facts as they were filed: company, item, year, value in thousands, filed when
    train.jsonl     questions with solutions
    bench.jsonl     questions about companies, and in wordings, that are in none of the others; one family of questions is new as well

Reports give values in thousands of US dollars. Some figures are restated a year later: the table then shows both.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SEED, TRAIN, BENCH, YEARS = 20261118, 80, 12, (2021, 2022, 2023)
FIRST = (
    "Alder", "Birch", "Cedar", "Delta", "Ember", "Falcon", "Granite", "Harbor", "Ivory", "Juniper", "Kestrel", "Lumen", "Maple",
    "Nordic", "Onyx", "Pioneer", "Quartz", "River", "Summit", "Tundra",
)  # fmt: skip
LAST = (
    "Foods", "Energy", "Systems", "Freight", "Textiles", "Mining", "Devices", "Hotels", "Papers", "Chemicals", "Optics", "Motors"
)  # fmt: skip
ITEMS = ("Revenue", "Costs", "Expenses", "Income")
ABOUT = {"licence": "CC0-1.0"}


class Report(NamedTuple):
    """One company: values by item and year, in thousands; what was first reported, where it was restated."""

    company: str
    values: dict[str, dict[int, int]]
    restated: tuple[str, int, int] | None  # item, year, value as first reported

    def table(self) -> str:
        lines = [f"{self.company}, in thousands of USD", "item | " + " | ".join(map(str, YEARS))]
        for item, row in self.values.items():
            lines.append(f"{item} | " + " | ".join(f"{row[year]}" for year in YEARS))
        if self.restated:
            item, year, before = self.restated
            lines.append(f"{item} {year} as first reported | {before}")
        return "\n".join(lines)


def reports() -> list[Report]:
    rng, names = random.Random(SEED), [f"{a} {b}" for a in FIRST for b in LAST]
    rng.shuffle(names)
    return [_report(rng, name) for name in names[: TRAIN + BENCH]]


def _report(rng: random.Random, company: str) -> Report:
    values: dict[str, dict[int, int]] = {item: {} for item in ITEMS}
    revenue = rng.randrange(200, 9000)
    for year in YEARS:
        revenue = max(100, round(revenue * rng.uniform(0.8, 1.3)))
        cost, expenses = round(revenue * rng.uniform(0.4, 0.7)), round(revenue * rng.uniform(0.1, 0.25))
        operating = revenue - cost - expenses
        for item, value in zip(ITEMS, (revenue, cost, expenses, operating), strict=True):
            values[item][year] = value
    item, year = rng.choice(ITEMS[:3]), rng.choice(YEARS[:2])
    before = round(values[item][year] * rng.uniform(0.9, 1.1)) + 1
    return Report(company, values, (item, year, before) if rng.random() < 0.4 else None)


# Wordings by family: the last one is for the benchmark only.
WORDS = {
    "look-up": ("What was {item} in {year}?", "{company}: {item}, {year}?", "How much {item} did {company} report for {year}?"),
    "restated": ("What was {item} in {year} as first reported?", "Before it was restated, {item} of {year} was?",
                 "Which figure did {company} originally file for {item} in {year}?"),
    "which year": ("In which year was {item} higher, {one} or {two}?", "{item}: which of {one} and {two} was higher?",
                   "Did {company} have more {item} in {one} or in {two}?"),
    "sum": ("What were {item} and {other} together in {year}?", "{year}: {item} plus {other}?", "Add {item} to {other} for {year}."),
    "margin": ("What was the share of {item} in Revenue in {year}, in %?", "{item} as % of Revenue, {year}?",
               "How many per cent of Revenue was {item} in {year}?"),
    "growth": ("By how many % did {item} change from {one} to {two}?", "Growth of {item} from {one} to {two}, in %?",
               "{item} of {two}, compared with {one}: what is the change in %?"),
    "difference": ("", "", "By how much did {item} of {two} differ from {one}?"),
}  # fmt: skip


def _question(rng: random.Random, report: Report, family: str) -> dict[str, Any] | None:
    """Return what a family asks of a report; None: it has nothing of that kind."""
    item, other = rng.sample(ITEMS, 2)
    year, (one, two) = rng.choice(YEARS), sorted(rng.sample(YEARS, 2))
    values = report.values
    money: dict[str, Any] = {"kind": "number", "unit": "thousand USD"}
    share: dict[str, Any] = {"kind": "number", "unit": "%", "tolerance": 0.5}
    if family == "restated":
        if not report.restated:
            return None
        item, year, before = report.restated
        made = {**money, "answer": before}
    elif family == "look-up":
        made = {**money, "answer": values[item][year]}
    elif family == "which year":
        a, b = values[item][one], values[item][two]
        if a == b:
            return None
        made = {
            "kind": "choice",
            "choices": [str(one), str(two)],
            "answer": str(two if b > a else one),
            "solution": f"{one}: {a}, {two}: {b}.",
        }
    elif family == "sum":
        a, b = values[item][year], values[other][year]
        made = {**money, "answer": a + b, "solution": f"{a} + {b} = {a + b}."}
    elif family == "margin":
        item = rng.choice(ITEMS[1:])
        a, b = values[item][year], values["Revenue"][year]
        made = {**share, "answer": round(100 * a / b, 1), "solution": f"{a} / {b}."}
    else:
        a, b = values[item][one], values[item][two]
        if family == "growth":
            made = {**share, "answer": round(100 * (b - a) / a, 1), "solution": f"{a} to {b}."}
        else:
            made = {**money, "answer": b - a, "solution": f"{b} - {a}."}
    return {
        "facts": {"item": item, "other": other, "year": year, "one": one, "two": two, "company": report.company},
        "made": made,
    }


def questions(
    rng: random.Random, found: list[Report], each: dict[str, int], wordings: Callable[[], int]
) -> Iterator[dict[str, Any]]:
    for report in found:
        for family, count in each.items():
            asked = set()
            for number in range(count):
                drawn, wording = _question(rng, report, family), wordings()
                if family == "difference":
                    wording = 2
                if drawn is None:
                    continue
                text = WORDS[family][wording].format(**drawn["facts"])
                if text in asked:
                    continue
                asked.add(text)
                new = "new family" if family == "difference" else "new wording" if wording == 2 else "known wording"
                yield {"id": f"{report.company.lower().replace(' ', '-')}-{family.replace(' ', '-')}-{number}",
                       "question": f"{report.table()}\n{text}", **drawn["made"],
                       "topic": family, "family": f"{family}, {new}", "source": report.company}  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def text_of(report: Report) -> str:
    """Return a report as a filing would put it: the table, then what it says in words."""
    said = [report.table(), ""]
    for item, row in report.values.items():
        said += [f"{item} of {report.company} in {year} was {row[year]} thousand USD." for year in YEARS]
        first, last = row[YEARS[0]], row[YEARS[-1]]
        verb = "rose" if last > first else "fell"
        said.append(f"From {YEARS[0]} to {YEARS[-1]} {item} {verb} from {first} to {last} thousand USD.")
    return "\n".join(said) + "\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    every, rng = reports(), random.Random(SEED + 1)
    train, bench = every[:TRAIN], every[TRAIN:]
    write(folder / "filings.jsonl", [{"text": text_of(report)} for report in train])
    write(folder / "facts.jsonl", [
        {"company": report.company, "item": item, "year": year, "value": value, "unit": "thousand USD", "filed": year + 1}
        for report in every for item, row in report.values.items() for year, value in row.items()
    ])  # fmt: skip
    each = {"look-up": 4, "restated": 1, "which year": 2, "sum": 1, "margin": 1, "growth": 1}
    rows = list(questions(rng, train, each, lambda: rng.randrange(2)))
    write(folder / "train.jsonl", [{"set": "finance", "split": "train", **ABOUT}, *rows])
    few = {"look-up": 2, "restated": 1, "which year": 1, "sum": 1, "margin": 1, "growth": 1, "difference": 1}
    held = list(questions(rng, bench, few, lambda: rng.randrange(3)))
    write(folder / "bench.jsonl", [{"set": "finance-bench", "split": "bench", **ABOUT}, *held])
    print(f"{folder}: {len(train)} reports, {len(rows)} questions to train on, {len(held)} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/finance"))
