"""Numbers with units: enough of them for doses, laboratories and accounts, so that 5 mg is 0.005 g and 3 thousand USD is 3000 USD.

A unit is a product and quotient of names: `mg/kg/day`, `mL per h`, `USD million`. A name that is not known here is a unit of its own,
equal to itself only. Temperatures are left out: they are no multiples of each other.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Unit(NamedTuple):
    """What one of it is in base units, and powers of those."""

    factor: float
    powers: frozenset[tuple[str, int]]


NUMBER = "number"  # the table of what has no dimension: per cent, thousand
BASES = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))
KNOWN = {name: (factor, base.removesuffix(NUMBER)) for base, units in BASES.items() for name, factor in units.items()}
PLURAL = {f"{name}s": name for name in KNOWN if len(name) > 3 or name == "bp"}
NAME = re.compile(r"([^\W\d_][^\W\d_$]*|us\$|[%$€])(?:\^?([1-3]))?")


def unit_of(text: str) -> Unit | None:
    """Return the unit that a text writes; None: it writes none, or more than that."""
    factor, powers, sign = 1.0, Counter[str](), 1
    parts = re.split(r"(/|\bper\b)|[\s·*]+", text.strip().lower().replace("µ", "u").replace("μ", "u"))
    for part in filter(None, parts):
        if part in {"/", "per"}:
            sign = -1
            continue
        match = NAME.fullmatch(part)
        if not match:
            return None
        name, power = PLURAL.get(match[1], match[1]), sign * int(match[2] or 1)
        one, base = KNOWN.get(name, (1.0, name))
        factor *= one**power
        if base:
            powers[base] += power
    found = frozenset((base, power) for base, power in powers.items() if power)
    return Unit(factor, found) if text.strip() and parts[-1] not in {"/", "per", ""} else None
