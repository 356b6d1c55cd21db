"""Write the record of sprout 0 (lineage.json beside its weights) from what its training left behind.

    python recipes/sprout0/record.py

Only for this first sprout, which was made before Etude had a `pretrain` stage that writes its record itself.
"""

import hashlib
import json
from pathlib import Path

from etude.files import digest_of, sha256_file
from etude.lineage.compute import training_flops
from etude.lineage.environment import Code, Hardware
from etude.lineage.licences import identify
from etude.lineage.record import CarriedLicence, Compute, DataUse, FileDigest, Lineage, RecipeUse, Record
from etude.models.shape import model_shape

here = Path(__file__).parent
model = here.parents[1] / "src/etude/models/sprout"
metrics = json.loads((here / "metrics.json").read_text())
sources = json.loads((here / "sources.json").read_text())
trained_on = [package for package in sources["packages"] if package["split"] == "train"]
windows, rest = divmod(metrics["tokens"], metrics["config"]["context"])
assert rest == 0
scripts = {name: sha256_file(here / name) for name in ("corpus.py", "tokenizer.py", "pretrain.py", "run_gpu.sh")}
weights = model / "model.safetensors"
record = Record(
    stage="sprout",
    kind="pretrain",
    kind_version=0,
    fingerprint=digest_of({"scripts": scripts, "settings": metrics["config"]}),
    parents=[],
    data=[DataUse(
        name="permissively licensed Python packages",
        source="recipes/sprout0/sources.json",
        revision=None,
        digest=hashlib.sha256((here / "sources.json").read_bytes()).hexdigest(),
        files=sum(package["files"] for package in trained_on),
        bytes=sum(package["bytes"] for package in trained_on),
        left_out=sources["files_dropped"],
    )],
    code=Code(etude="0.1.0", revision=None, dirty=None),
    recipe=RecipeUse(hash=digest_of(scripts), stage=metrics["config"]),
    seeds={"recipe": metrics["config"]["seed"]},
    packages={"torch": metrics["torch"], "transformers": metrics["transformers"]},
    hardware=Hardware(system="Linux x86_64", cpu="not recorded", cores=16, memory_bytes=128 << 30, accelerators=[metrics["device"]]),
    compute=Compute(
        tokens=metrics["tokens"],
        model_flops=float(windows * training_flops(model_shape(model).compute, metrics["config"]["context"])),
        method="operations",
        device=metrics["device"],
        device_seconds=metrics["seconds"],
    ),
    weights={weights.name: FileDigest(sha256=sha256_file(weights), bytes=weights.stat().st_size)},
    licences=[CarriedLicence(
        file="LICENSE", sha256=sha256_file(model / "LICENSE"), licence=identify((model / "LICENSE").read_text()), inherited_from="Etude"
    )],
    summary={"bits_per_byte": metrics["bits_per_byte"], "parameters": metrics["parameters"]},
    started="2026-11-15T03:06:00+00:00",
    finished="2026-11-15T03:12:00+00:00",
    sessions=1,
)
Lineage.of(record, []).save(model)
print(f"{model / 'lineage.json'}: {record.compute.model_flops:.3e} FLOP, record {record.id[:12]}")
