"""Conversations as the tokens a policy sees and samples, which are not the tokens of the whole text.

What a policy samples begins a token of its own: no merge crosses the border between prompt and answer, and later turns
follow the sampled tokens, which are never tokenised again. Learnt is what the assistant writes, up to its end-of-turn token.
Some templates rewrite the past (Qwen3's drops old reasoning): a conversation then becomes several, each with the past as the
policy sees it at that turn, and each answer is still learnt once.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from etude.data.chat.conversations import Conversation
from etude.errors import UserError, one_line

if TYPE_CHECKING:
    import numpy.typing as npt

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PROBE = Conversation([{"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}], origin="a probe")
ADVICE = 'use template = "chatml" or another .jinja file'


class Encoded(NamedTuple):
    """What the policy sees and samples in one conversation."""

    tokens: npt.NDArray[np.int64]  # [T]
    learnt: npt.NDArray[np.bool_]  # [T]: sampled by the assistant


class ChatTemplate:
    """A tokeniser and its chat template. `added` tokens are new to it: the model may need as many embeddings more."""

    def __init__(self, tokeniser: Any, name: str, added: int = 0) -> None:
        self.tokeniser, self.name, self.added = tokeniser, name, added
        closing = self._render(PROBE, 2).rpartition("reply")[2]
        special = {number for number, token in tokeniser.added_tokens_decoder.items() if token.special}
        self.end_token = next((number for number in self._tokens(closing) if number in special), -1)
        if self.end_token < 0:
            raise UserError(f"chat template {name!r} puts no special token after an assistant's message; {ADVICE}")
        self.end: str = tokeniser.convert_ids_to_tokens(self.end_token)  # generation stops at it

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Return all up to the last answer: one sequence, or several if the template rewrites the past."""
        sequences: list[list[str]] = []  # each: prompt, answer, prompt, answer, …, what follows the last answer
        written = ""  # in the last sequence, up to the end of its last answer
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                prompt = self._render(conversation, index, add_generation_prompt=True)
                answer, rest = self._answer(conversation, index, prompt)
                if sequences and prompt.startswith(written):
                    sequences[-1][-1:] = [prompt[len(written) :], answer, rest]
                else:
                    sequences.append([prompt, answer, rest])
                written = prompt + answer
        return [self._encoded(pieces) for pieces in sequences]

    def _answer(self, conversation: Conversation, index: int, prompt: str) -> tuple[str, str]:
        """Return what the assistant writes after a prompt, and what the template puts behind that."""
        message, whole = conversation.messages[index], self._render(conversation, index + 1)
        said, end, rest = whole[len(prompt) :].rpartition(self.end)
        fault = f"{conversation.origin}: chat template {self.name!r}"
        if not (whole.startswith(prompt) and end):
            raise UserError(f"{fault} does not show an answer as its prompt begins it, up to {self.end}; {ADVICE}")
        if self.end in said:
            raise UserError(f"{conversation.origin}: an assistant's message spells {self.end}, which ends it; mend it")
        texts = [message["content"].strip(), message.get("reasoning_content", "").strip()]
        texts += [call["function"]["name"] for call in message.get("tool_calls", [])]
        lost = [text for text in texts if text not in said]
        lost += [name for tool in conversation.tools if (name := tool["function"]["name"]) not in prompt]
        if lost:
            raise UserError(f"{fault} leaves out {lost[0][:40]!r}, a tool, a call or text of an answer; {ADVICE}")
        return said + end, rest

    def _render(self, conversation: Conversation, count: int, **options: bool) -> str:
        messages, tools = conversation.messages[:count], conversation.tools or None
        try:
            return str(self.tokeniser.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except Exception as error:  # noqa: BLE001 - templates are programs and fail in many ways
            raise UserError(f"{conversation.origin}: chat template {self.name!r} fails: {one_line(error)}") from None

    def _encoded(self, pieces: list[str]) -> Encoded:
        # All but the first behind an end token, as some tokenisers put a space before the first word of a text.
        parts = [self._tokens(pieces[0]), *(self._tokens(self.end + piece)[1:] for piece in pieces[1:])]
        learnt = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        return Encoded(np.array([token for part in parts for token in part], np.int64), learnt)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokeniser.encode(text, add_special_tokens=False, verbose=False))


def choose_template(tokeniser: Any, wish: str) -> ChatTemplate:
    """Give the tokeniser its template: "base", "chatml" (with the tokens it lacks), "auto" (base or chatml), or a file's."""
    size = len(tokeniser)
    if wish == "auto":
        wish = "base" if tokeniser.chat_template else "chatml"
    if wish == "chatml":
        known = {token.content for token in tokeniser.added_tokens_decoder.values()}
        tokeniser.add_tokens([token for token in CHATML_TOKENS if token not in known], special_tokens=True)
        shipped = resources.files("etude.models").joinpath("sprout", "chat_template.jinja")
        tokeniser.chat_template = shipped.read_text(encoding="utf-8")
    elif wish != "base":
        try:
            tokeniser.chat_template = Path(wish).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f'template {wish!r} is not "base", "chatml", "auto" or a file: {one_line(error)}') from None
    elif not tokeniser.chat_template:
        raise UserError(f'template = "base", but the tokeniser of the base has no chat template; {ADVICE}')
    return ChatTemplate(tokeniser, wish, len(tokeniser) - size)
