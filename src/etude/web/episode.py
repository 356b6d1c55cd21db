"""One rollout: what it was worth and why, the tree of what was thought, done and answered, its diff; and one turn token by token."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from etude.agent.trace import Trace, from_json, sampled_nodes
from etude.errors import UserError, visible
from etude.rl.exchange import OBSERVED, episode_file
from etude.rl.ledger import Finished  # noqa: TC001 - named in an annotation that is read
from etude.web.html import Html, data, details, diff, element, facts, join, link, note, pre, section, short, table
from etude.web.metrics import metrics_of
from etude.web.overview import page_of
from etude.web.rollouts import rollouts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from etude.agent.trace import Node
    from etude.web.overview import View
    from etude.web.reading import Run, Stage
    from etude.web.rollouts import Group, Rollouts

DEEPEST = 40  # branches within branches
MOST_NODES, MOST_TOKENS = 2_000, 20_000  # shown of one rollout, of one turn
LISTED = 2_000  # tokens in the table beside the coloured ones
KEPT = 64  # traces held, as the same ones are asked for again
WORDS = 160  # characters of a rollout in a table
EXCERPT = 1_200  # characters of a rollout on a card
KINDS = {"opening": "what was asked", "turn": "turn", "answers": "answers of the tools", "summary_request": "asked for a summary",
         "summary": "summary", "restart": "begun again from the summary", "note": "note"}  # fmt: skip


def trace_of(rollouts: Rollouts, group: int, number: int) -> Trace | None:
    """Return the trace of a rollout; None if it was not kept, or is none."""
    path = rollouts.trace_of(group, number)
    if path is None:
        return None
    return read_trace(rollouts.stage, path)


def read_trace(stage: Stage, path: str, line: int | None = None) -> Trace | None:
    """Return the trace in a file of the stage, or in a line of it."""
    kept: dict[tuple[str, int | None], Trace] = stage.run.caches.setdefault("traces", {})
    if (found := kept.get((f"{stage.path}/{path}", line))) is not None:
        return found
    with contextlib.suppress(UserError, OSError):
        text = stage.read(path) if line is None else stage.lines(path).line(line)
        trace = from_json(text, path)
        while len(kept) >= KEPT:
            kept.pop(next(iter(kept)))
        kept[f"{stage.path}/{path}", line] = trace
        return trace
    return None


def lesson(gain: float, fate: str) -> str:
    """Say what a rollout taught, in a sentence."""
    how = f"advantage {gain:+.3f}".replace("-", "−")
    if fate != "trained":
        return f"{how}; it was not trained on"
    if abs(gain) < 1e-9:
        return f"{how}: as good as its group's mean, so it taught nothing"
    if gain > 0:
        return f"{how}: better than its group's mean, so its tokens were made more likely"
    return f"{how}: worse than its group's mean, so its tokens were made less likely"


def first_words(trace: Trace) -> str:
    """Return what the policy wrote, in some words."""
    said = " ".join(" ".join(node.text for node in trace.nodes if node.sampled).split())
    return said[:WORDS] + "…" * (len(said) > WORDS)


def in_short(trace: Trace) -> Html:
    """Return what a rollout did, for a card: its turns and its diff, cut."""
    said = "\n".join(node.text for node in trace.nodes if node.sampled)
    parts = [element("pre", said[:EXCERPT] + ("…" if len(said) > EXCERPT else ""), tabindex=0)]
    if trace.diff:
        parts.append(details(f"diff, {trace.diff.count(chr(10))} lines", diff(trace.diff[: 4 * EXCERPT])))
    return join(*parts)


def rollout(stage: Stage, group: int, number: int) -> View:
    """Show one rollout of reinforcement learning."""
    rollouts = rollouts_of(stage)
    own = rollouts.group(group)
    finished, trace = rollouts.finished(own, number), trace_of(rollouts, group, number)
    if finished is None and trace is None:
        raise KeyError(number)
    gain = rollouts.advantages(own).get(number)
    way = [(f"Group {group}", f"{stage.address}/group-{group}.html")]
    lead = note(f"This rollout: {lesson(gain, own.fate)}.", "lesson") if gain is not None else None
    name = f"rollout-{group}-{number}"
    parts = [section("", lead, *_worth(rollouts, own, number, finished))]
    more: list[str] = []
    if trace is None:
        parts.append(note("The trace of this rollout was not kept: the recipe has keep_traces = false. Its numbers are; of each "
                          "step the best, the worst and the strangest rollout are kept whole.", "empty"))  # fmt: skip
    else:
        parts.append(tree(trace, name))
        more = turns_of(trace, name)
    return page_of(stage, join(*parts), f"Rollout {group}/{number}", way, more)


def _worth(rollouts: Rollouts, group: Group, number: int, finished: Finished | None) -> Iterator[Html]:
    """Yield what it was worth: the reward, its parts times their weights, against the others of its group."""
    reward = group.rewards.get(number)
    if finished is None:
        return
    weights = rollouts.weights_of(group.step)
    rows = [(part, f"{value:+.3f}", f"× {weights[part]:g}" if part in weights else "–", f"{weights.get(part, 0.0) * value:+.3f}")
            for part, value in finished.parts.items()]  # fmt: skip
    versions = f"{finished.oldest}" if finished.oldest == finished.newest else f"{finished.oldest} to {finished.newest}"
    yield facts({
        "task": group.task, "tests": "✓ passed" if finished.outcome == "pass" else "✗ failed",
        "reward": f"{reward:.3f}" if reward is not None else "not known yet",
        "group's mean": f"{group.mean:.3f} of {len(group.rewards)}" if group.rewards else "–",
        "trained in": link(f"step-{group.step}.html", f"step {group.step}") if group.fate == "trained" else f"no step: {group.fate}",
        "sampled by weights of version": versions, "turns": finished.turns, "tokens sampled": f"{finished.sampled:,}",
        "time": f"{finished.seconds:.1f} s",
    })  # fmt: skip
    yield table(("part of the reward", ">value", ">weight", ">adds"), rows)
    habits = facts({name.replace("_", " "): short(value) for name, value in finished.behaviour.items()})
    yield details("Behaviour, as the monitors count it", habits)


def tree(trace: Trace, name: str) -> Html:
    """Return a trace as a tree, and what it changed. `name`: of its page, from which the pages of its turns are named."""
    score = trace.made_by.get("score")
    judged = score if isinstance(score, dict) else {}
    verdict = facts({
        "why it ended": trace.stop, "tests said": str(judged.get("outcome", "")), "because": str(judged.get("reason") or ""),
        "sandbox": str(trace.made_by.get("sandbox", "")), "sandbox lost": str(trace.made_by.get("lost", "")),
        **{kind.replace("_", " "): count for kind, count in trace.counts.items()},
    })  # fmt: skip
    printed = [details(test, pre(said)) for test, said in _texts(judged.get("said"))[:10]]
    about = (
        note("Of the tests that did not pass, the first two at most, with the end of what they printed:")
        if printed
        else None
    )
    ended = section("How it ended", verdict, about, *printed)
    changed = diff(trace.diff) if trace.diff else note("No file was changed.", "empty")
    return join(section("What it did", nodes(trace, name)), section("What it changed", changed), ended)


def nodes(trace: Trace, name: str = "") -> Html:
    """Return a trace's nodes as a tree; without a `name` its turns have no pages."""
    children: dict[int | None, list[int]] = {}
    for place, node in enumerate(trace.nodes[:MOST_NODES]):
        children.setdefault(node.parent, []).append(place)
    drawn = [_branch(trace, children, root, name, 0) for root in children.get(None, [])]
    left = len(trace.nodes) - MOST_NODES
    return join(*drawn, note(f"{left} more nodes are not shown.", "warning") if left > 0 else None)


def turns_of(trace: Trace, name: str) -> list[str]:
    """Return the pages of a trace's turns."""
    return [f"{name}-{place}.html" for place, node in enumerate(trace.nodes[:MOST_NODES]) if node.sampled]


def _branch(trace: Trace, children: Mapping[int | None, list[int]], place: int, name: str, depth: int) -> Html:
    """Return a node and all after it; where the tree branches, each branch in itself."""
    parts, at = [], place
    while True:
        parts.append(_node(trace.nodes[at], at, name))
        after = children.get(at, [])
        if len(after) != 1:
            break
        at = after[0]
    if len(after) > 1 and depth >= DEEPEST:
        parts.append(note("Branches deeper than this are not shown.", "warning"))
        after = []
    for number, each in enumerate(after, 1):
        title = f"branch {number} of {len(after)}: {KINDS.get(trace.nodes[each].kind, '')}"
        parts.append(details(title, _branch(trace, children, each, name, depth + 1), open_=True, cls="branch"))
    return join(*parts)


def _node(node: Node, place: int, name: str) -> Html:
    """Return one node."""
    count = f"{len(node.tokens):,} tokens"
    tokens = link(f"{name}-{place}.html", f"{count}, one by one", cls="tokens-link") if name else count
    kind = KINDS.get(node.kind, node.kind)
    head = element("h3", kind, element("small", f" · {node.seconds:.1f} s · " if node.sampled else " · ", tokens))
    body = list(_said(node)) if node.sampled else list(_answered(node))
    whole = element("article", head, *body, cls=f"node {'sampled' if node.sampled else 'given'}", id=f"node-{place}")
    return details(element("span", kind, cls="given"), whole) if node.kind == "opening" else whole


def _said(node: Node) -> Iterator[Html]:
    """Yield what the policy wrote: thinking, words, calls, faults."""
    about = node.details
    if thinking := about.get("thinking"):
        yield details("thinking", pre(str(thinking)), open_=len(str(thinking)) < 400, cls="thinking")
    if said := about.get("said", node.text):
        yield pre(str(said))
    for call in _dicts(about.get("calls")):
        arguments = call.get("arguments")
        rows = [(key, pre(value if isinstance(value, str) else repr(value))) for key, value in _pairs(arguments)]
        title = element("span", "▸ call of ", element("strong", str(call.get("name", ""))))
        yield details(title, table(("argument", "value"), rows), open_=True)
    if about.get("malformed") and not about.get("said"):  # calls are shown as they were read, and these were not
        yield pre(node.text)
    for fault in about.get("malformed") or ():
        yield note(f"✗ malformed: {fault}", "warning")


def _answered(node: Node) -> Iterator[Html]:
    """Yield what the policy was given."""
    answers = _dicts(node.details.get("answers"))
    for answer in answers:
        mark = "✗" if answer.get("failed") else "↳"
        title = f"{mark} {answer.get('name', '')} · {short(_float(answer.get('seconds')))} s"
        text = str(answer.get("text", ""))
        yield details(title, pre(text), open_=len(text) < 1_500)
    if not answers:
        yield pre(node.text)
    if request := node.details.get("request"):
        yield pre(str(request))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _pairs(value: Any) -> Sequence[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _texts(value: Any) -> list[tuple[str, str]]:
    return [(name, said) for name, said in _pairs(value) if isinstance(said, str)]


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# ---- one turn, token by token


def tokens(stage: Stage, group: int, number: int, place: int) -> View:
    """Show a node of a rollout token by token."""
    rollouts = rollouts_of(stage)
    own, trace = rollouts.group(group), trace_of(rollouts, group, number)
    if trace is None or not 0 <= place < len(trace.nodes):
        raise KeyError(place)
    gain, trained = rollouts.advantages(own).get(number), own.fate == "trained"
    seen = observed(stage, group, number, trace, place) if trained else {}
    missing = _not_kept(stage, own.step) if trained and not seen and trace.nodes[place].trainable else ""
    ways = {f"Group {group}": f"group-{group}", f"Rollout {group}/{number}": f"rollout-{group}-{number}"}
    learnt = bool(rollouts.algorithm.settings.train_summaries) if trained and not rollouts.fallback else True
    body = token_page(stage, trace, place, gain if trained else None, seen, learnt_summaries=learnt, missing=missing)
    parts = rollouts.finished(own, number)
    reward = facts({part: f"{value:+.3f}" for part, value in parts.parts.items()}) if parts else None
    body = join(body, section("Parts of the rollout's reward, unweighted", reward))
    way = [(words, f"{stage.address}/{name}.html") for words, name in ways.items()]
    return page_of(stage, body, f"Tokens of {trace.nodes[place].kind} {place}", way)


def observed(stage: Stage, group: int, number: int, trace: Trace, place: int) -> dict[str, list[float]]:
    """Return what the trainer computed of a node's tokens before it learnt from them: log-probs, and which tokens it masked.

    Nothing where that was not kept (`keep_traces`), or is not of this trace.
    """
    folder, _, name = episode_file(group, number).rpartition("/")
    kept, order = stage.json(f"{folder}/{OBSERVED}"), sampled_nodes(trace)
    own = kept.get(name) if isinstance(kept, dict) else None
    if not isinstance(own, dict) or place not in order:
        return {}
    sizes = [len(trace.nodes[each].tokens) for each in order]
    begin = sum(sizes[: order.index(place)])
    columns: dict[str, Any] = {"trainer": own.get("logprobs"), "masked": own.get("masked")}
    for values in columns.values():
        if not isinstance(values, list) or len(values) != sum(sizes) or not all(map(_plain, values)):
            return {}
    return {name: values[begin : begin + len(trace.nodes[place].tokens)] for name, values in columns.items()}


def _plain(value: Any) -> bool:
    """Whether it is a log-prob or a mark as the trainer writes them: none where a log-prob was no number."""
    return value is None or (type(value) in {int, float} and abs(value) < 1e6)


def _not_kept(stage: Stage, step: int) -> str:
    """Say what is known of a step whose trainer kept nothing of single tokens."""
    metrics = metrics_of(stage)
    found = {name: dict(metrics.points(name)).get(step) for name in ("mismatch_mean", "mismatch_p99", "masked")}
    known = [f"{name.removeprefix('mismatch_')} {value:.2g}" for name, value in found.items() if value is not None]
    about = f" Of all tokens of step {step}: {', '.join(known)} (nats; share masked)." if known else ""
    return f"The trainer's own log-probs are not here, as the recipe had keep_traces = false or was run before they were kept.{about}"


def token_page(
    stage: Stage, trace: Trace, place: int, gain: float | None, seen: Mapping[str, list[float]] | None = None, *,
    learnt_summaries: bool, missing: str = "",
) -> Html:  # fmt: skip
    """Return a node's tokens with all that the files say of each; what they do not say is said."""
    node = trace.nodes[place]
    shown = node.tokens[:MOST_TOKENS]
    texts, unknown = token_texts(stage.run, shown)
    learnt = node.trainable and gain is not None and (learnt_summaries or node.kind != "summary")
    columns: dict[str, Any] = {
        "id": shown, "text": texts, "logprob": [round(each, 7) for each in node.logprobs[:MOST_TOKENS]],
        "raw": [round(each, 4) for each in node.raw_logprobs[:MOST_TOKENS]], "version": node.versions[:MOST_TOKENS],
        "advantage": round(gain, 4) if gain is not None else None, "learnt": learnt,
        "trainer": (seen or {}).get("trainer", [])[:MOST_TOKENS], "masked": (seen or {}).get("masked", [])[:MOST_TOKENS],
    }  # fmt: skip
    said = [note(each) for each in (missing, unknown) if each]
    if len(node.tokens) > MOST_TOKENS:
        said.append(note(f"{len(node.tokens) - MOST_TOKENS:,} more tokens are not shown.", "warning"))
    why = _mask(node, gain, learnt=learnt)
    three = (node.logprobs, node.raw_logprobs, columns["trainer"])
    rows = [(at, shown[at], texts[at], *(f"{column[at]:.3f}" if column and column[at] is not None else "–" for column in three),
             node.versions[at] if node.versions else "–") for at in range(min(len(shown), LISTED))]  # fmt: skip
    listed = table((">place", ">id", "text", ">log-prob", ">at temperature 1", ">by the trainer", ">weights"), rows)
    box = element("div", data("tokens", columns), cls="tokens", data_tokens=True)
    sampled = "yes, by the policy" if node.sampled else "no, it was given"
    return join(section("", facts({"sampled": sampled, "tokens": f"{len(node.tokens):,}", "loss mask": why}), box, *said),
                section("", details(f"As a table (the first {len(rows):,})", listed)))  # fmt: skip


def _mask(node: Node, gain: float | None, *, learnt: bool) -> str:
    if learnt:
        return "1: these tokens were learnt from"
    if not node.sampled:
        return "0: given, not sampled"
    if not node.trainable:
        return "0: no log-probs were reported"
    return "0: this rollout was not trained on" if gain is None else "0: summaries are masked by the recipe"


def token_texts(run: Run, ids: Sequence[int]) -> tuple[list[str], str]:
    """Return the text of each token, visible, and what to say if it is not known."""
    tokeniser = _tokeniser(run)
    if tokeniser is None:
        unknown = "The run holds no tokeniser that can be read, so tokens are shown by their ids."
        return [f"#{each}" for each in ids], unknown
    texts = []
    for each in ids:
        text = tokeniser.decode([each], skip_special_tokens=False) if each < 1 << 31 else ""
        if not text or "\N{REPLACEMENT CHARACTER}" in text:  # a part of a character, or no token at all
            text = (tokeniser.id_to_token(each) if each < 1 << 31 else None) or f"#{each}"
        texts.append(visible(text))
    return texts, ""


def _tokeniser(run: Run) -> Any:
    """Return the tokeniser of the run's models, which all stages share."""
    if "tokeniser" not in run.caches:
        places = [f"{each.path}/{inner}" for each in reversed(run.stages) for inner in ("model", "tokeniser")]
        for place in places:
            with contextlib.suppress(OSError, UserError, Exception):  # what their library raises has no other name
                run.caches["tokeniser"] = Tokenizer.from_str(run.read(f"{place}/tokenizer.json").decode())
                break
    return run.caches.get("tokeniser")
