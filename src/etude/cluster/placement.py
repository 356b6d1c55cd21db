"""What a recipe's `[cluster]` takes, as one Ray placement group; refused at once where the cluster can never have it.

A bundle is what must be on one node: a rank of the trainer, an engine, a pool of sandboxes. Ray packs them and gives all or nothing.
Sandboxes are kept off nodes with GPUs where the others have room for all of them. Ray does not hand bundles out in any order, so
ranks are numbered by node and GPU when they are there (trainer.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from etude.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from etude.recipe.cluster import ClusterSettings

    Part = Literal["trainer", "engines", "sandboxes"]

NEWS = 10.0  # seconds between two lines that say what is waited for
SMALLEST = 1e-6  # Ray counts in ten-thousandths


@dataclass(frozen=True)
class Bundle:
    """What one part wants of one node."""

    part: Part
    takes: dict[str, float]


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, as Ray tells it."""

    id: str
    address: str
    has: dict[str, float]  # GPU, CPU

    def __str__(self) -> str:
        return f"{self.address} ({words(self.has)})"


def words(amounts: dict[str, float]) -> str:
    """Return resources as a person says them."""
    said = [
        f"{amount:g} {name}{'s' * (amount != 1)}"
        for name, amount in amounts.items()
        if amount and name in {"GPU", "CPU"}
    ]
    return ", ".join(said) or "nothing"


def nodes() -> list[Node]:
    """Return the nodes that are alive."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    return [Node(each["NodeID"], each["NodeManagerAddress"], {name: each["Resources"].get(name, 0.0) for name in ("GPU", "CPU")})
            for each in alive]  # fmt: skip


def free() -> str:
    """Return in words what nobody uses now."""
    return words(ray.available_resources())


def bundles(settings: ClusterSettings) -> list[Bundle]:
    """Return what is asked for: ranks first, then engines, then pools."""
    one: dict[str, float] = {"GPU": 1, "CPU": 1} if settings.trainer.gpus else {"CPU": 1}
    trainer = [Bundle("trainer", one) for _ in range(settings.ranks)]
    engines = [Bundle("engines", each.bundle) for each in settings.engines for _ in range(each.count)]
    pools = settings.sandboxes.pools if settings.sandboxes else []
    return [*trainer, *engines, *(Bundle("sandboxes", {"CPU": cores}) for cores in pools)]


def left_over(wanted: Sequence[Bundle], available: Sequence[Node]) -> list[Bundle]:
    """Return the bundles for which there is no room, each put where it fits and the largest first."""
    rest = {node.id: Counter(node.has) for node in available}
    without = []
    for bundle in sorted(wanted, key=lambda each: (-each.takes.get("GPU", 0), -each.takes.get("CPU", 0))):
        # Where no GPU is left unused, if that can be had.
        fits = [
            free
            for free in rest.values()
            if all(free[name] >= amount - SMALLEST for name, amount in bundle.takes.items())
        ]
        if not fits:
            without.append(bundle)
            continue
        chosen = min(fits, key=lambda free: (free["GPU"], free["CPU"]))
        chosen.subtract(bundle.takes)
    return without


def refuse_impossible(wanted: Sequence[Bundle], available: Sequence[Node]) -> None:
    """Refuse what this cluster can never have, saying what it has."""
    without = left_over(wanted, available)
    if not without:
        return
    asked, missing = Counter[str](), Counter[str](bundle.part for bundle in without)
    for bundle in wanted:
        asked.update(bundle.takes)
    parts = ", ".join(f"{count} of {part}" for part, count in missing.items())
    has = "; ".join(map(str, available)) or "no node"
    what = f"[cluster] asks for {words(dict(asked))} in {len(wanted)} places, and there is no room for {parts}"
    raise UserError(f"{what}: the cluster has {has}; ask for less, or add nodes")


class Placement:
    """A placement group that is there."""

    def __init__(self, wanted: Sequence[Bundle]) -> None:
        self.wanted = list(wanted)
        available = nodes()
        refuse_impossible(self.wanted, available)
        self.group: Any = placement_group([each.takes for each in wanted], strategy="PACK", **self._apart(available))

    def _apart(self, available: Sequence[Node]) -> dict[str, Any]:
        """Keep sandboxes off the nodes with GPUs, if the others have room for them."""
        hosts = [node for node in available if node.has["GPU"]]
        pools = [each for each in self.wanted if each.part == "sandboxes"]
        if not hosts or not pools or left_over(pools, [node for node in available if node not in hosts]):
            return {}
        elsewhere = {"ray.io/node-id": f"!in({','.join(node.id for node in hosts)})"}
        return {"bundle_label_selector": [elsewhere if each.part == "sandboxes" else {} for each in self.wanted]}

    async def ready(self, say: Callable[[str], None]) -> None:
        """Wait for the group, saying what is waited for."""
        waited = 0.0
        while not await asyncio.to_thread(self.group.wait, NEWS):
            waited += NEWS
            left = free()
            say(
                f"cluster: waiting since {waited:.0f} s for {len(self.wanted)} places; free now: {left} (others use the rest)"
            )

    def of(self, part: Part) -> list[int]:
        """Return the numbers of a part's bundles."""
        return [number for number, each in enumerate(self.wanted) if each.part == part]

    def options(self, bundle: int) -> dict[str, Any]:
        """Return how an actor is put into a bundle, of which it takes all."""
        takes = self.wanted[bundle].takes
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return {"num_cpus": takes.get("CPU", 0), "num_gpus": takes.get("GPU", 0), "scheduling_strategy": strategy}

    def state(self, bundle: int) -> str:
        """Return in words what a bundle waits for."""
        table = ray.util.placement_group_table(self.group)
        takes = words(self.wanted[bundle].takes)
        placed = table["bundles_to_node_id"].get(bundle) in {node.id for node in nodes()}
        return "its node is there and starts it" if placed else f"no node has {takes} free (the cluster: {free()})"

    def remove(self) -> None:
        remove_placement_group(self.group)
