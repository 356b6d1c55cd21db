#!/usr/bin/env bash
# Two one-minute probes (AdamW, Muon), then the better optimiser for five minutes, all within 9.5 minutes of wall clock.
# What comes back under $OUT is the final model's folder and probes.json; the probes' weights stay in a scratch folder.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
scratch=$(mktemp -d)
mkdir -p "$out"
export PYTHONUNBUFFERED=1
wall_limit=570   # seconds for everything
closing=45       # seconds kept for start, compilation from cache, export and the last evaluation

for optimiser in adamw muon; do
  python3 "$here/pretrain.py" --name "$optimiser" --optimiser "$optimiser" --minutes 1 --out "$scratch" \
    || echo "probe $optimiser FAILED"
done

python3 - "$scratch" "$out/probes.json" > "$scratch/best" <<'PYTHON'
import json, pathlib, sys
probes = [json.loads(path.read_text()) for path in sorted(pathlib.Path(sys.argv[1]).glob("*/metrics.json"))]
pathlib.Path(sys.argv[2]).write_text(json.dumps(probes, indent=1))
print(min(probes, key=lambda probe: probe["bits_per_byte"])["name"])
PYTHON
best=$(cat "$scratch/best")

left=$((wall_limit - closing - SECONDS))
minutes=$(python3 -c "print(round(min(300, $left) / 60, 2))")
echo "final run: $best for $minutes minutes"
python3 "$here/pretrain.py" --name sprout --optimiser "$best" --minutes "$minutes" --out "$out"

python3 - "$out" <<'PYTHON'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
runs = json.loads((out / "probes.json").read_text()) + [json.loads((out / "sprout/metrics.json").read_text())]
print(f"{'run':8}{'bits/byte':>10}{'loss':>8}{'steps':>8}{'Mtokens':>9}{'epochs':>8}{'Mtok/s':>8}{'train s':>9}{'compile s':>11}")
for r in runs:
    print(f"{r['name']:8}{r['bits_per_byte']:10.4f}{r['loss_curve'][-1]['loss']:8.3f}{r['steps']:8}{r['tokens'] / 1e6:9.0f}"
          f"{r['epochs']:8.1f}{r['tokens_per_second'] / 1e6:8.2f}{r['seconds']:9.0f}{r['compile_seconds']:11.0f}")
PYTHON
echo "wall clock: $SECONDS s"
