"""Keep the figures of a finished comparison that a page quotes: results/NAME.json, from the stage's own files.

    python benchmarks/keep_comparison.py runs/quickstart/compare compare-cpu "make quickstart"

Nothing is measured here: machine, versions, date and revision are those in the stage's record.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from etude.bench.base_comparison import difference
from etude.lineage.record import load_record
from etude.report.bases import ranked, verdict
from etude.run.stages.compare import load_results

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Read a stage's folder, print its verdict and one JSON line, and keep that."""
    folder, name, command = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    record, order = load_record(folder), ranked(load_results(folder))
    behind = {other.name: difference(other.bits, order[0].bits) for other in order[1:]}
    kept = {
        "script": "etude compare",
        "date": record.finished,
        "command": command,
        "settings": record.recipe.stage,
        "hardware": record.hardware.model_dump(),
        "code": record.code.model_dump(),
        "packages": record.packages,
        "data": [use.model_dump() for use in record.data],
        "compute": record.compute.model_dump(),
        "rows": [asdict(result) for result in order],
        "bits_per_byte_behind_the_first": {
            other: {"difference": value, "interval": interval} for other, (value, interval) in behind.items()
        },
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(verdict(order))
    print(json.dumps(kept))


if __name__ == "__main__":
    main()
