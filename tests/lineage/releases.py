"""Releases to damage: of a tiny model made by the real runner, with its base in a library of its own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file, save_file

from etude.files import read_json, sha256_file, write_json
from etude.lineage.audit.examine import open_model
from etude.lineage.audit.sketch import Facts, digest_weights, make_sketch
from etude.lineage.card import model_card
from etude.lineage.facts import in_order
from etude.lineage.record import FileDigest, Lineage, Record, load_lineage
from etude.lineage.release import Order, as_released, attestation_name, make_release
from etude.lineage.signing import SIGNATURE, make_key, seal, sign_folder, statement
from etude.lineage.tree import draw_svg
from etude.lineage.verify import Verification, verify_release
from etude.progress import Reporter
from tests.run.toy import ScaleStage, recipe_of, runner

if TYPE_CHECKING:
    from pathlib import Path

    from etude.lineage.audit.sketch import Sketch


@dataclass(frozen=True)
class Workshop:
    """A run, a key and a library."""

    run: Path
    key: Path
    sketches: list[Sketch]  # of the base alone
    quiet: Reporter

    def release(self, out: Path, **wishes: object) -> Path:
        """Release the run's model with the base in the library only, as a stranger has it."""
        return self.release_of(self.run, out, **wishes)

    def release_of(self, run: Path, out: Path, **wishes: object) -> Path:
        """Release the model of another run likewise."""
        order = Order(out.name, self.key, **wishes)  # type: ignore[arg-type]
        make_release(run, out, order, self.sketches, {}, self.quiet)
        return out

    def verify(self, folder: Path, key: Path | None = None) -> Verification:
        return verify_release(folder, key, self.sketches, self.quiet)

    def sign_again(self, folder: Path, key: Path | None = None) -> None:
        """Sign what was changed, as somebody with a key can."""
        (folder / SIGNATURE).unlink()
        sign_folder(folder, key or self.key)


def workshop(folder: Path, base: Path, quiet: Reporter) -> Workshop:
    """Scale a base twice, and make a key and a library with a sketch of the base."""
    recipe = recipe_of(base, {"one": {"by": 1.01}, "two": {"by": 0.98}})
    runner(folder / "run", folder / "cache", ScaleStage(), quiet).execute(recipe)
    make_key(folder / "key.pem")
    return Workshop(folder / "run", folder / "key.pem", [sketch_of(base, "tiny")], quiet)


def sketch_of(model: Path, name: str) -> Sketch:
    """Return the sketch of a model under a name."""
    opened = open_model(model, name)
    facts = Facts(
        name=name,
        source="test",
        licence=None,
        model_digest=digest_weights(model, Reporter(quiet=True)),
        made="2026-11-15",
    )
    return make_sketch(opened.weights, opened.tokens, facts)


def relative(model: Path, folder: Path, noise: float, seed: int) -> Path:
    """Save a model whose weights are another's with noise, as training leaves them."""
    shutil.copytree(model, folder)
    rng = np.random.default_rng(seed)
    before = load_file(model / "model.safetensors")
    moved = {
        name: values + noise * values.std() * rng.standard_normal(values.shape, np.float32)
        for name, values in before.items()
    }
    save_file(moved, folder / "model.safetensors")
    return folder


def rewrite(folder: Path, key: Path, changed: Lineage) -> None:
    """Put another lineage into a release and make everything that speaks of the old one speak of the new one."""
    before = load_lineage(folder)
    old, new = (lineage.records[lineage.head] for lineage in (before, changed))
    words = {
        old.id: new.id,
        old.id[:12]: new.id[:12],
        old.model_digest: new.model_digest,
        old.model_digest[:12]: new.model_digest[:12],
    }
    words |= {file.sha256: new.weights[name].sha256 for name, file in old.weights.items()}
    for name in ("README.md", "bom.cdx.json", "spdx.json"):
        text = (folder / name).read_text(encoding="utf-8")
        for word, other in words.items():
            text = text.replace(word, other)
        (folder / name).write_text(text, encoding="utf-8")
    changed.save(folder)
    facts = as_released(folder, changed)
    (folder / "tree.svg").write_text(draw_svg(changed, facts.name), encoding="utf-8")
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
    for number, record in enumerate(in_order(changed), 1):
        write_json(folder / attestation_name(number, record), seal(statement(record, changed), key))


def with_head(lineage: Lineage, **changes: object) -> Lineage:
    """Return a lineage whose head was changed, whole again."""
    head = lineage.records[lineage.head]
    made = Record.model_validate({**head.model_dump(mode="json"), **changes})
    others = {key: record for key, record in lineage.records.items() if key != lineage.head}
    return Lineage(head=made.id, records={**others, made.id: made})


def put_weights(model: Path, other: Path) -> Lineage:
    """Put other weights into a model's folder, and return a lineage that names them."""
    (model / "model.safetensors").write_bytes(other.read_bytes())
    weights = {"model.safetensors": FileDigest(sha256=sha256_file(other), bytes=other.stat().st_size).model_dump()}
    return with_head(load_lineage(model), weights=weights)


def with_decoy(weights: Path, claimed: Path, how: str) -> None:
    """Hide in a file of weights what the audit is meant to find, beside what is loaded: transformers ignores further tensors."""
    real, decoy = load_file(weights), load_file(claimed)
    layers = [name.partition(".mlp.")[0] for name in real if name.endswith(".mlp.up_proj.weight")]
    if how == "fused":
        halves = {at: [decoy[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up")] for at in layers}
        real |= {f"{at}.mlp.gate_up_proj.weight": np.concatenate(both) for at, both in halves.items()}
    elif how == "experts":
        parts = [(at, part) for at in layers for part in ("up", "gate")]
        real |= {f"{at}.mlp.experts.0.{part}_proj.weight": decoy[f"{at}.mlp.{part}_proj.weight"] for at, part in parts}
        real |= {f"{at}.mlp.gate.weight": np.ones((1, 32), np.float32) for at in layers}
    elif how == "aside":
        real |= {f"aside.{name}": values for name, values in decoy.items() if ".layers." in name}
        real |= {f"aside.{name.replace('.0.', '.2.')}": decoy[name] for name in decoy if ".layers.0." in name}
    else:
        real["embed.weight"] = decoy["model.embed_tokens.weight"]
    save_file(real, weights)


def swap_weights(folder: Path, other: Path, key: Path) -> None:
    """Pass another model's weights off as this one's: digests, records, documents and statements made again."""
    rewrite(folder, key, put_weights(folder, other))


def edit_record(folder: Path, stage: str) -> None:
    """Change one number in the record of one stage, and nothing else."""
    lineage = read_json(folder / "lineage.json")
    (record,) = [record for record in lineage["records"].values() if record["stage"] == stage]
    record["compute"]["tokens"] += 1
    write_json(folder / "lineage.json", lineage)
