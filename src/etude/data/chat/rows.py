"""Conversations packed whole into the rows of a corpus in memory, so that a `Loader` serves them as it does any other."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from etude.data.chat.template import Encoded
from etude.data.loader import Batch, Corpus, Series
from etude.data.packing import pack
from etude.data.shards import Shard
from etude.errors import UserError
from etude.files import digest_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

CHAT = "chat"  # the only source, and its domain


@dataclass(frozen=True, eq=False)
class ChatShard(Shard):
    """Packed rows, and which of their tokens are learnt."""

    learnt: npt.NDArray[np.bool_]  # [T]


class ChatCorpus(Corpus):
    """A corpus of `ChatShard`s."""

    def read(self, places: Sequence[tuple[str, Any, int]]) -> Batch:
        """Read rows with the tokens to learn, none of which is padding."""
        batch = super().read(places)
        learnt = np.zeros(batch.tokens.shape, np.bool_)
        spans = [shard.learnt[shard.rows[index] : shard.rows[index + 1]] for _, shard, index in places]
        learnt[batch.documents >= 0] = np.concatenate(spans)
        return replace(batch, learnt=learnt)


def pack_chat(
    splits: Mapping[str, Sequence[Encoded]], *, length: int, separator: int, vocabulary: int, too_long: Literal["drop", "cut"]
) -> tuple[ChatCorpus, dict[str, dict[str, int]]]:  # fmt: skip
    """Pack each split, "train" and others; return also, by split, what became of its conversations. Empty ones are left out."""
    fitted = {split: _fitted(conversations, length, too_long) for split, conversations in splits.items()}
    counts = {split: counted for split, (_, counted) in fitted.items()}
    if not fitted["train"][0]:
        raise UserError(f'a mask that hides every token: {counts}; use a length over {length}, or too_long = "cut"')
    shards = {split: _shard(kept, length) for split, (kept, _) in sorted(fitted.items()) if kept}
    series = {split: {CHAT: Series(CHAT, [shard])} for split, shard in shards.items()}
    arrays = [part for shard in shards.values() for part in (shard.tokens, shard.pieces, shard.rows, shard.learnt)]
    contents = [hashlib.sha256(part.tobytes()).hexdigest() for part in arrays]
    digest = digest_of([length, separator, list(shards), contents])
    place, share, domain = Path("the conversations"), {CHAT: 1.0}, {CHAT: CHAT}
    return ChatCorpus(place, length, separator, vocabulary, share, domain, series, digest), counts


def _shard(conversations: Sequence[Encoded], length: int) -> ChatShard:
    packed = pack([len(each.tokens) for each in conversations], length)
    ends = np.concatenate([[0], np.cumsum(packed.lengths)])
    in_order = [conversations[index] for index in packed.documents]
    tokens, learnt = (np.concatenate(each) for each in zip(*in_order, strict=True))
    return ChatShard(tokens.astype(np.uint32), ends[packed.offsets], ends, packed.documents, packed.offsets, learnt)


def _fitted(conversations: Sequence[Encoded], length: int, too_long: str) -> tuple[list[Encoded], dict[str, int]]:
    """Return those that fit into a row and have something to learn, cut if so wished; and counts of all."""
    kept, counts = [], Counter({"conversations": len(conversations)})
    for tokens, learnt in conversations:
        if len(tokens) > length and too_long == "drop":
            counts["too long, dropped"] += 1
        elif not learnt[1:length].any():  # the first token is predicted from nothing
            counts["nothing to learn within the length, dropped"] += 1
        else:
            counts["cut"] += len(tokens) > length
            kept.append(Encoded(tokens[:length], learnt[:length]))
            counts.update({"tokens": len(kept[-1].tokens), "learnt tokens": int(kept[-1].learnt.sum())})
    return kept, dict(counts)
