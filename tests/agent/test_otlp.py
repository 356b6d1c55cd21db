"""Spans: the protocol's own messages take them, times and links hold together, and a collector gets them."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given

from etude.agent.otlp import LATEST, post, to_otlp
from etude.agent.trace import Node, Trace, write_traces
from etude.errors import UserError
from tests.agent.traces import episode, traces
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Etude

ENDED = 1.75e9


def spans_of(line: str) -> list[Any]:
    """Return the spans as the protocol's own messages, which refuse what they do not know. Its JSON has ids in hex, protobuf's in base64."""
    request = json.loads(line)
    for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for holder in (span, *span.get("links", [])):
            for name in {"traceId", "spanId", "parentSpanId"} & {*holder}:
                holder[name] = base64.b64encode(bytes.fromhex(holder[name])).decode()
    # Not in the extra `dev`: where it is and OpenTelemetry's SDK is not, Ray takes both for there, and its nodes do not start.
    protocol = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="pip install opentelemetry-proto"
    )
    (resource,) = ParseDict(request, protocol.ExportTraceServiceRequest()).resource_spans
    return list(resource.scope_spans[0].spans)


def attributes(holder: Any) -> dict[str, Any]:
    found = {}
    for each in holder.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    assert len(found) == len(holder.attributes)
    return found


def hold_together(spans: list[Any]) -> None:
    ids = [span.span_id for span in spans]
    assert len({*ids}) == len(ids)
    assert {len(each) for each in ids} == {8}
    assert [len(span.trace_id) for span in spans] == [16] * len(spans)
    assert len({span.trace_id for span in spans}) == 1
    roots = [span for span in spans if not span.parent_span_id]
    assert [span.name for span in roots] == ["invoke_agent etude"]
    for span in spans:
        assert span.parent_span_id in {b"", *ids}
        assert {link.span_id for link in span.links} <= {*ids}
        assert 0 <= span.start_time_unix_nano <= span.end_time_unix_nano <= LATEST


@given(traces())
def test_the_protocol_takes_the_spans_of_any_trace(trace: Trace) -> None:
    spans = spans_of(to_otlp(trace, ENDED, content=True))
    hold_together(spans)
    assert sum(span.name.startswith("chat") for span in spans) == sum(
        node.kind in {"turn", "summary"} for node in trace.nodes
    )
    calls = [
        call["name"]
        for node in trace.nodes
        if node.kind in {"turn", "summary"}
        for call in node.details.get("calls", [])
    ]
    assert [span.name for span in spans if span.name.startswith("execute_tool ")] == [
        f"execute_tool {name}" for name in calls
    ]
    assert {event.name for event in spans[0].events} <= {"gen_ai.evaluation.result"}
    assert len(spans[0].events) == len(trace.rewards)


def test_an_episode_of_four_contexts_is_told_by_the_conventions() -> None:
    trace = episode()
    trace.made_by["settings"] = {"temperature": 0.7}
    spans = spans_of(to_otlp(trace, ENDED))
    hold_together(spans)
    root, by_id = spans[0], {span.span_id: span for span in spans}
    assert attributes(root)["gen_ai.operation.name"] == "invoke_agent"
    assert attributes(root)["gen_ai.conversation.id"] == "fix-1"
    assert "seconds since the episode began" in attributes(root)["etude.time"]
    assert [attributes(event) for event in root.events] == [
        {"gen_ai.evaluation.name": "tests", "gen_ai.evaluation.score.value": 1.0},
        {"gen_ai.evaluation.name": "length", "gen_ai.evaluation.score.value": -0.25},
    ]
    assert root.end_time_unix_nano == ENDED * 1e9
    chats = [span for span in spans if span.name == "chat sprout"]
    sampled = [place for place, node in enumerate(trace.nodes) if node.sampled]
    for place, span in zip(sampled, chats, strict=True):
        told, node = attributes(span), trace.nodes[place]
        assert told["gen_ai.usage.input_tokens"] + told["gen_ai.usage.output_tokens"] == len(trace.context(place))
        assert (told["gen_ai.usage.output_tokens"], told["gen_ai.request.temperature"]) == (len(node.tokens), 0.7)
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(node.seconds * 1e9, abs=1000)
        assert (span.kind, told["gen_ai.request.model"], told["etude.kind"]) == (3, "sprout", node.kind)
    assert attributes(chats[0])["gen_ai.usage.cache_read.input_tokens"] == 7
    assert [attributes(span).get("gen_ai.response.finish_reasons") for span in chats[:3]] == [
        ["stop"],
        ["length"],
        ["length"],
    ]
    contexts = [span for span in spans if span.name.startswith("context")]
    assert len(contexts) == 3
    for context in contexts:  # each goes on from the summary that ended the one before
        assert context.parent_span_id == root.span_id
        (link,) = context.links
        assert attributes(by_id[link.span_id])["etude.kind"] == "summary"
    assert [sum(span.parent_span_id == each.span_id for span in chats) for each in (root, *contexts)] == [3, 3, 3, 1]
    assert by_id[chats[1].links[0].span_id] == chats[0]
    assert not chats[3].links  # the first of a context goes on from no turn
    tools = [span for span in spans if span.name.startswith("execute_tool")]
    assert [span.name for span in tools] == ["execute_tool edit", "execute_tool shell"] * 3
    edit, shell = tools[:2]
    assert (attributes(edit).get("error.type"), edit.status.code) == (None, 0)
    assert (attributes(shell)["error.type"], shell.status.code) == ("tool_error", 2)
    assert shell.start_time_unix_nano == edit.end_time_unix_nano
    assert shell.end_time_unix_nano - shell.start_time_unix_nano == pytest.approx(2e9, abs=1000)
    assert attributes(shell)["gen_ai.tool.name"] == "shell"
    assert by_id[shell.links[0].span_id] == chats[0]


def test_what_was_said_stays_out_unless_it_is_asked_for() -> None:
    trace = episode()
    secrets = ("Mend the parser", "hm, hm", "I try.", "pytest -q", "line 47", "x = 1", "raw", "Be good", "summary 2")
    plain, full = to_otlp(trace, ENDED), to_otlp(trace, ENDED, content=True)
    assert not [words for words in secrets if words in plain]
    told = "\n".join(str(value) for span in spans_of(full) for value in attributes(span).values())
    assert not [words for words in secrets[:6] if words not in told]
    chat = next(span for span in spans_of(full) if span.name.startswith("chat"))
    (message,) = json.loads(attributes(chat)["gen_ai.output.messages"])
    assert message == {
        "role": "assistant",
        "parts": [{"type": "reasoning", "content": "hm, hm"}, {"type": "text", "content": "I try."}],
    }


def test_names_are_those_of_the_conventions() -> None:
    known = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes", reason="pip install opentelemetry-semantic-conventions")  # fmt: skip
    names = {value for name, value in vars(known).items() if name.isupper() and isinstance(value, str)}
    spans = spans_of(to_otlp(episode(), ENDED, content=True))
    used = {
        key
        for span in spans
        for holder in (span, *span.events)
        for key in attributes(holder)
        if key.startswith("gen_ai.")
    }
    assert len(used) > 15
    assert used <= names


def test_a_trace_without_times_is_spaced_and_says_so() -> None:
    trace = episode()
    trace.nodes = [dataclasses.replace(node, began=0.0, seconds=0.0) for node in trace.nodes]
    spans = spans_of(to_otlp(trace, ENDED))
    hold_together(spans)
    assert "no times are known: 1 ms a node" in attributes(spans[0])["etude.time"]
    begins = [span.start_time_unix_nano for span in spans if span.name.startswith("chat")]
    assert begins == sorted({*begins})
    assert to_otlp(trace, ENDED) == to_otlp(trace, ENDED)


@pytest.mark.parametrize("details", [{"calls": 5}, {"calls": [3]}, {"calls": [{"name": "x", "arguments": {}}], "unread": "no"}])  # fmt: skip
def test_details_that_no_harness_wrote_are_refused(details: dict[str, Any]) -> None:
    trace = Trace("odd", "x", [Node(None, "turn", [], "", details=details)])
    with pytest.raises(UserError, match=one_line("trace 'odd' has details that no harness of ours wrote")):
        to_otlp(trace, ENDED)


@pytest.mark.parametrize("times", [(-1e308, 1e300), (1e300, 0.0), (0.0, 1e300), (-5.0, -1e300)])
def test_times_that_no_clock_shows_are_bounded(times: tuple[float, float]) -> None:
    hold_together(
        spans_of(to_otlp(Trace("odd", "x", [Node(None, "turn", [], "", began=times[0], seconds=times[1])]), ENDED))
    )


class Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, str | None, bytes]]
    answer: tuple[int, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Collector.got.append((self.path, self.headers["Content-Type"], body))
        self.send_response(Collector.answer[0])
        self.send_header("Content-Length", str(len(Collector.answer[1])))
        self.end_headers()
        self.wfile.write(Collector.answer[1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.got, Collector.answer = [], (200, b"{}")
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_traces(tmp_path / "t.jsonl", [episode(), dataclasses.replace(episode(), id="other")])
    return tmp_path / "t.jsonl"


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_a_collector_gets_a_request_an_episode(etude: Etude, collector: str, file: Path, path: str) -> None:
    assert etude("trace", "export", file, "--otlp", collector + path).code == 0
    assert [(to, kind) for to, kind, _ in Collector.got] == [("/v1/traces", "application/json")] * 2
    ids = [attributes(spans_of(body.decode())[0])["gen_ai.conversation.id"] for _, _, body in Collector.got]
    assert ids == ["fix-1", "other"]


def test_a_folder_gets_a_line_an_episode(etude: Etude, file: Path, tmp_path: Path) -> None:
    assert etude("trace", "export", file, "--otlp", tmp_path / "out", "--episode", "2").code == 0
    (line,) = (tmp_path / "out/traces.otlp.jsonl").read_text().splitlines()
    root = spans_of(line)[0]
    assert attributes(root)["gen_ai.conversation.id"] == "other"
    assert root.end_time_unix_nano == pytest.approx(file.stat().st_mtime_ns, abs=1000)


PARTIAL = b'{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}'


@pytest.mark.parametrize(("answer", "words"), [((500, b"no"), ("took no traces", "500")), ((200, b"<html>"), ("took no traces", "collector")), ((200, b"[]"), ("took no traces",)), ((200, PARTIAL), ("rejected 3 spans", "too old"))])  # fmt: skip
def test_what_a_collector_does_not_take_is_told(
    collector: str, answer: tuple[int, bytes], words: tuple[str, ...]
) -> None:
    Collector.answer = answer
    with pytest.raises(UserError, match=one_line(f"{collector}/v1/traces", *words)):
        post(to_otlp(episode(), ENDED), collector)


def test_a_collector_that_is_not_there_and_options_that_do_not_fit_are_one_line(
    etude: Etude, file: Path, tmp_path: Path
) -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        gone = f"http://127.0.0.1:{server.server_port}"
    said = etude("trace", "export", file, "--otlp", gone)
    assert (said.code, f"{gone}/v1/traces took no traces" in said.err) == (2, True)
    assert len(said.err.splitlines()) == 1
    for options in ([], ["--atif", tmp_path, "--otlp", tmp_path], ["--atif", tmp_path, "--content"]):
        said = etude("trace", "export", file, *options)
        assert (said.code, "--atif FOLDER or --otlp FOLDER" in said.err) == (2, True)
