"""What every benchmark ends with: a table for people, one JSON line for programs, and where the result is kept."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from etude.lineage import environment

RESULTS = Path(__file__).parent / "results"


def finish(script: str, rows: list[dict[str, Any]], hardware: str, **more: Any) -> None:
    """Print the rows as a table, keep them with their surroundings in results/SCRIPT-HARDWARE.json, print that as JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    widths = [max(len(str(row.get(column, ""))) for row in [*rows, {column: column}]) for column in columns]
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        print("  ".join(str(row.get(column, "")).ljust(width) for column, width in zip(columns, widths, strict=True)))
    result = {
        "script": script,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "hardware": environment.hardware().model_dump(),
        "code": environment.code().model_dump(),
        "packages": environment.packages(),
        "rows": rows,
        **more,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{script}-{hardware}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
