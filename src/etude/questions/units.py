"""Numbers with units: enough of them for doses, laboratories and accounts, so that 5 mg is 0.005 g and 3 thousand USD is 3000 USD.

A unit is a product and quotient of names: `mg/kg/day`, `mL per h`, `USD million`. A name that is not known here is a unit of its own,
equal to itself only. Temperatures are left out: they are no multiples of each other.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple


class Unit(NamedTuple):
    """What one of it is in base units, and powers of those."""

    factor: float
    powers: frozenset[tuple[str, int]]


KNOWN = {  # name: factor, base
    "g": (1.0, "g"), "gram": (1.0, "g"), "kg": (1e3, "g"), "mg": (1e-3, "g"), "ug": (1e-6, "g"), "mcg": (1e-6, "g"), "ng": (1e-9, "g"),
    "l": (1.0, "l"), "litre": (1.0, "l"), "liter": (1.0, "l"), "dl": (0.1, "l"), "ml": (1e-3, "l"), "ul": (1e-6, "l"),
    "mol": (1.0, "mol"), "mmol": (1e-3, "mol"), "umol": (1e-6, "mol"), "nmol": (1e-9, "mol"),
    "m": (1.0, "m"), "cm": (1e-2, "m"), "mm": (1e-3, "m"), "km": (1e3, "m"),
    "s": (1.0, "s"), "sec": (1.0, "s"), "second": (1.0, "s"), "min": (60.0, "s"), "minute": (60.0, "s"), "h": (3600.0, "s"),
    "hr": (3600.0, "s"), "hour": (3600.0, "s"), "d": (86400.0, "s"), "day": (86400.0, "s"), "week": (604800.0, "s"),
    "%": (0.01, ""), "percent": (0.01, ""), "bp": (1e-4, ""), "hundred": (1e2, ""), "thousand": (1e3, ""), "million": (1e6, ""),
    "billion": (1e9, ""), "$": (1.0, "usd"), "us$": (1.0, "usd"), "dollar": (1.0, "usd"), "€": (1.0, "eur"), "euro": (1.0, "eur"),
    "kcal": (1e3, "cal"), "j": (1 / 4.184, "cal"), "kj": (1e3 / 4.184, "cal"),
}  # fmt: skip
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
