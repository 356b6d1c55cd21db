"""Tokens are those the policy is given and samples; learnt is what the assistant wrote and nothing else."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from etude.data.chat import CHATML_TOKENS, ChatTemplate, Conversation, Encoded, choose_template
from etude.errors import UserError
from tests import tiny
from tests.data.talks import CONVERSATIONS, SPROUT, TOOLS, answers, call, said, tokeniser
from tests.lineage.refusals import one_line

TRACE = Conversation(
    [said("user", "hi"), said("assistant", "", tool_calls=[call({"a": 1})]), said("tool", "r"), said("assistant", "ok")], TOOLS, "f.jsonl, line 7"
)  # fmt: skip
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@cache
def chatml(name: str) -> ChatTemplate:
    return choose_template(tokeniser(name), "chatml")


def learnt_runs(encoded: Encoded) -> list[list[int]]:
    """Return the learnt tokens, run by run."""
    borders = np.flatnonzero(np.diff(encoded.learnt)) + 1
    runs = zip(np.split(encoded.tokens, borders), np.split(encoded.learnt, borders), strict=True)
    return [tokens.tolist() for tokens, learnt in runs if learnt[0]]


@settings(max_examples=60)
@given(conversation=CONVERSATIONS, name=st.sampled_from(["sprout", "tiny"]))
@example(TRACE, "sprout")
def test_learnt_is_what_the_assistant_writes_and_all_is_as_served(conversation: Conversation, name: str) -> None:
    template, tok = chatml(name), tokeniser(name)
    (encoded,) = template.encode(conversation)
    expected = answers(conversation)
    runs = learnt_runs(encoded)
    assert [tok.decode(run) for run in runs] == expected
    assert runs == [tok.encode(answer, add_special_tokens=False) for answer in expected]
    roles = [message["role"] for message in conversation.messages]
    first, last = roles.index("assistant"), len(roles) - roles[::-1].index("assistant")
    prompt = tok.apply_chat_template(
        conversation.messages[:first], tools=conversation.tools or None, add_generation_prompt=True, return_dict=False
    )
    assert encoded.tokens[: len(prompt)].tolist() == prompt
    assert encoded.learnt.argmax() == len(prompt)
    whole = tok.apply_chat_template(conversation.messages[:last], tools=conversation.tools or None, tokenize=False)
    assert tok.decode(encoded.tokens) == whole
    assert whole.endswith("<|im_end|>\n")
    assert not encoded.learnt[-1]


def test_no_token_crosses_the_border_where_the_whole_text_has_one_that_does() -> None:
    conversation = Conversation([said("user", "hi"), said("assistant", "\n\nx")])
    template, tok = chatml("sprout"), tokeniser("sprout")
    (encoded,) = template.encode(conversation)
    whole = tok.apply_chat_template(conversation.messages, return_dict=False)
    assert whole != encoded.tokens.tolist()  # the control: a merge that no policy can sample
    assert tok.decode(whole) == tok.decode(encoded.tokens)
    assert [tok.decode(run) for run in learnt_runs(encoded)] == ["\n\nx<|im_end|>"]


def test_tokens_are_added_once_and_survive_saving(tmp_path: Path) -> None:
    tok = tiny.tokeniser()
    size = len(tok)
    template = choose_template(tok, "auto")
    assert (template.name, template.added, len(tok)) == ("chatml", 6, size + 6)
    assert (template.end, template.end_token) == ("<|im_end|>", size + 1)
    tok.save_pretrained(tmp_path)
    again = choose_template(AutoTokenizer.from_pretrained(tmp_path), "auto")
    assert (again.name, again.added) == ("base", 0)
    assert again.encode(TRACE)[0].tokens.tolist() == template.encode(TRACE)[0].tokens.tolist()
    assert {token for token in template.encode(TRACE)[0].tokens if token >= size} == set(
        range(size, size + len(CHATML_TOKENS))
    )


def test_sprout_has_all_tokens_and_its_own_template() -> None:
    tok = AutoTokenizer.from_pretrained(SPROUT)
    assert [(choose_template(tok, wish).name, choose_template(tok, wish).added) for wish in ("auto", "chatml")] == [
        ("base", 0),
        ("chatml", 0),
    ]


def with_template(tmp_path: Path, jinja: str, tok: Any = None) -> ChatTemplate:
    (tmp_path / "own.jinja").write_text(jinja)
    return choose_template(tok or AutoTokenizer.from_pretrained(SPROUT), str(tmp_path / "own.jinja"))


def test_a_template_that_rewrites_the_past_gives_a_sequence_for_each_turn(tmp_path: Path) -> None:
    forgets = PLAIN.replace(
        "{{ m.content }}",
        "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}",
    )
    template = with_template(tmp_path, forgets + PROMPT)
    messages = [
        said("user", "q"), said("assistant", "a", reasoning_content="why"), said("user", "r"), said("assistant", "b", reasoning_content="so")
    ]  # fmt: skip
    first, second = template.encode(Conversation(messages))
    decode = template.tokeniser.decode
    assert [[decode(run) for run in learnt_runs(each)] for each in (first, second)] == [
        ["(why)a<|im_end|>"],
        ["(so)b<|im_end|>"],
    ]
    assert decode(first.tokens) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n(why)a<|im_end|>\n"
    assert decode(second.tokens[~second.learnt]).startswith(
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )


def test_a_beginning_that_the_template_writes_is_there_once(tmp_path: Path) -> None:
    template = with_template(tmp_path, "{{ bos_token }}" + PLAIN + PROMPT)
    (encoded,) = template.encode(Conversation([said("user", "q"), said("assistant", "a")]))
    assert encoded.tokens.tolist().count(template.tokeniser.bos_token_id) == 1
    assert encoded.tokens[0] == template.tokeniser.bos_token_id


def test_a_template_may_put_nothing_behind_an_answer(tmp_path: Path) -> None:
    template = with_template(tmp_path, (PLAIN + PROMPT).replace("<|im_end|>\n", "<|im_end|>"))
    (encoded,) = template.encode(
        Conversation([said("user", "q"), said("assistant", " a"), said("user", "r"), said("assistant", "b")])
    )
    assert [template.tokeniser.decode(run) for run in learnt_runs(encoded)] == [" a<|im_end|>", "b<|im_end|>"]
    assert encoded.learnt[-1]


def test_no_space_is_invented_where_a_tokeniser_begins_texts_with_one(tmp_path: Path) -> None:
    letters = {token: number for number, token in enumerate(["<unk>", *"▁\nabcdefghijklmnopqrstuvwxyz"])}
    made = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = with_template(tmp_path, PLAIN + PROMPT, PreTrainedTokenizerFast(tokenizer_object=made))
    (encoded,) = template.encode(
        Conversation([said("user", "q"), said("assistant", "a b"), said("user", "c"), said("assistant", "d")])
    )
    written = "".join(template.tokeniser.convert_ids_to_tokens(encoded.tokens))
    assert (
        written
        == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na▁b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("jinja", "words"),
    [
        (PLAIN + PROMPT, ["'read'", "leaves out", "chatml"]),  # as SmolLM2's: calls and tools are silently dropped
        (PLAIN + PROMPT + "{% if messages[1] and messages[1].tool_calls %}{{ raise_exception('no calls\nhere') }}{% endif %}", ["fails: no calls here"]),
        ((PLAIN + PROMPT).replace("<|im_end|>\n", "{{ '' if m.tool_calls else '<|im_end|>' }}"), ["up to <|im_end|>"]),
        (PLAIN + "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}", ["as its prompt begins it"]),
    ],
)  # fmt: skip
def test_a_template_that_does_not_do_is_refused(tmp_path: Path, jinja: str, words: list[str]) -> None:
    template = with_template(tmp_path, jinja)
    with pytest.raises(UserError, match=one_line("f.jsonl, line 7", "own.jinja", *words)):
        template.encode(TRACE)


def test_what_can_be_seen_at_once_is_refused_at_once(tmp_path: Path) -> None:
    for jinja, words in [("{{ oh", "fails"), (PLAIN.replace("<|im_end|>", ""), "no special token")]:
        with pytest.raises(UserError, match=one_line("own.jinja", words)):
            with_template(tmp_path, jinja)
    with pytest.raises(UserError, match=one_line('"base"', "has no chat template", "chatml")):
        choose_template(tiny.tokeniser(), "base")
    with pytest.raises(UserError, match=one_line("'chatlm' is not", '"auto"', "or a file")):
        choose_template(tiny.tokeniser(), "chatlm")


def test_an_answer_that_spells_its_own_end_is_refused() -> None:
    conversation = Conversation([said("user", "q"), said("assistant", "a<|im_end|>b")], origin="x, line 1")
    with pytest.raises(UserError, match=one_line("x, line 1", "spells <|im_end|>")):
        chatml("sprout").encode(conversation)
