"""Which tensor is which where no name is known: by number and by shape.

A renamed model still has a stack of layers, each with the same matrices. The number that most names have, with the same count of
values, is the layer, another one the expert; without numbers, the order of the names tells, if the shapes repeat in it.
D being the width of most matrices, a feed-forward part is two [F, D] beside one [D, F] (which is down), or one [2F, D] that holds up
and gate; the router of E experts is [E, D]; the keys of grouped queries are the first of two [K, D] with no [D, K] beside them; the
embedding has the most rows of all outside the layers. Up and gate cannot be told apart by shape: whoever compares them has to try
both ways round.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    Shapes = Mapping[str, tuple[int, ...]]

NUMBER = re.compile(r"\d+")
STACKED = {"up_proj": "ffn_up_exps", "gate_proj": "ffn_gate_exps", "gate_up_proj": "mlp.experts.gate_up_proj"}


def by_role(shapes: Shapes) -> dict[str, str]:
    """Return names as Llama and DeepSeek have them for the tensors whose role can be told; none where it cannot."""
    matrices = {name: shapes[name] for name in sorted(shapes, key=_natural) if len(shapes[name]) in {2, 3}}
    layers = _numbered(matrices) or _repeated(matrices)
    if not layers:
        return {}
    width = Counter(size for shape in matrices.values() for size in set(shape[-2:])).most_common(1)[0][0]
    inside = {name for layer in layers for name in layer}
    outside = [name for name, shape in matrices.items() if name not in inside and shape[1:] == (width,)]
    outside.sort(key=lambda name: (-shapes[name][0], not re.search("emb|tok|wte", name)))
    names = dict(zip(("model.embed_tokens.weight", "lm_head.weight"), outside, strict=False))
    for index, layer in enumerate(layers):
        parts = _parts({name: matrices[name] for name in layer}, width)
        names |= {f"model.layers.{index}.{part}.weight": name for part, name in parts.items()}
    return names


def _natural(name: str) -> list[tuple[int, str]]:
    """Order names as people number them: 10 after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _numbered(matrices: Shapes) -> list[list[str]]:
    """Return the names of each layer: by the numbers that, after the same words, take as many values as those of most names."""
    found = {name: NUMBER.finditer(name) for name in matrices}
    places = {name: [(NUMBER.sub("#", name[: at.start()]), int(at[0])) for at in ats] for name, ats in found.items()}
    values: dict[str, set[int]] = defaultdict(set)
    for before, number in (place for numbers in places.values() for place in numbers):
        values[before].add(number)
    votes = Counter(len(values[before]) for numbers in places.values() for before, _ in numbers)
    depth = max((count for count in votes if count > 1), key=lambda count: (votes[count], count), default=0)
    layers: dict[int, list[str]] = defaultdict(list)
    for name, numbers in places.items():
        for layer in [number for before, number in numbers if len(values[before]) == depth][:1]:
            layers[layer].append(name)
    alike = Counter(frozenset(matrices[name] for name in names) for names in layers.values())
    shapes, times = alike.most_common(1)[0] if alike else ((), 0)
    return [layers[key] for key in sorted(layers)] if len(shapes) > 2 and times > 1 else []


def _repeated(matrices: Shapes) -> list[list[str]]:
    """Return the names of each layer by their order: the shortest run of shapes whose repetition leaves no more than three out."""
    names, shapes = list(matrices), list(matrices.values())
    for period in range(4, len(names) // 2 + 1):
        for start in range(4):
            times = (len(names) - start) // period
            if shapes[start : start + times * period] == shapes[start : start + period] * times and times > 1:
                return [names[start + at * period :][:period] for at in range(times)]
    return []


def _parts(layer: Shapes, width: int) -> dict[str, str]:
    """Return the parts of one layer by their usual names."""
    experts, plain = _experts(layer, width)
    stacks = _ffn({name: shape[1:] for name, shape in plain.items() if len(shape) == 3}, width)
    count = len(experts) or max((layer[name][0] for name in stacks.values()), default=0)
    parts = {STACKED[part]: name for part, name in stacks.items()}
    for index, expert in enumerate(experts):
        parts |= {f"mlp.experts.{index}.{part}": name for part, name in expert.items()}
    if count and (routers := [name for name, shape in plain.items() if shape == (count, width)]):
        parts["mlp.gate"] = routers[0]
    parts |= {f"mlp.{'shared_experts.' * bool(count)}{part}": name for part, name in _ffn(plain, width).items()}
    rest = [shape for name, shape in plain.items() if name not in parts.values()]
    keys = min((shape for shape in rest if rest.count(shape) == 2 and shape[::-1] not in rest), default=None)
    return parts | ({"self_attn.k_proj": next(name for name in plain if plain[name] == keys)} if keys else {})


def _experts(layer: Shapes, width: int) -> tuple[list[dict[str, str]], Shapes]:
    """Return up and gate of each expert, and what belongs to none: a number whose values each have a feed-forward part."""
    for place in range(3):
        numbered: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name, shape in layer.items():
            for number in NUMBER.findall(name)[place : place + 1]:
                numbered[int(number)][name] = shape
        experts = {number: parts for number in sorted(numbered) if (parts := _ffn(numbered[number], width))}
        if len(experts) > 1:
            theirs = {name for number in experts for name in numbered[number]}
            return list(experts.values()), {name: shape for name, shape in layer.items() if name not in theirs}
    return [], layer


def _ffn(matrices: Shapes, width: int) -> dict[str, str]:
    """Return up and gate, in whichever order, or the two in one, or an up that has no gate; the widest there is."""
    by_shape: dict[frozenset[int], dict[tuple[int, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, shape in matrices.items():
        by_shape[frozenset(shape)][shape].append(name)
    sizes = sorted({size for shape in matrices.values() for size in shape} - {width}, reverse=True)
    for names in ([*by_shape[frozenset((units, width))].values()] for units in sizes):
        down, readers = sorted(names, key=len) if len(names) == 2 else ([], [])
        if (len(down), len(readers)) == (1, 2):
            return dict(zip(("up_proj", "gate_proj"), readers, strict=True))
    for units in sizes:
        narrow, wide = ([*by_shape[frozenset((size, width))].values()] for size in (units, 2 * units))
        if list(map(len, narrow)) == list(map(len, wide)) == [1]:
            return {"gate_up_proj": wide[0][0]}
        if list(map(len, narrow)) == [1, 1]:
            return {"up_proj": by_shape[frozenset((units, width))][units, width][0]}
    return {}
