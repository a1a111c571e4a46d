"""Host. OpenTelemetry: a span a prompt under vLLM's names, below the client's own; asked for without its packages."""

import socket
import sys
import time

import pytest

from jaxspec.config.server import ServerConfig
from jaxspec.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxspec.errors import ConfigError
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.serve.server import main
from jaxspec.serve.tracing import RequestTracer, _figures, open_tracer
from tests.serve.fake import ANSWER, NUM_SPEC_TOKENS, FakeEngine, serving

COMPLETIONS = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.fixture
def memory():
    """(tracer, exporter that keeps its spans)."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's packages are not here")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider)
    yield tracer, exporter
    tracer.close()


def spans(exporter, number):
    deadline = time.monotonic() + 10
    while len(found := exporter.get_finished_spans()) < number:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return sorted(found, key=lambda span: span.attributes["gen_ai.request.id"])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_span_a_prompt(memory, streamed):
    tracer, exporter = memory
    asked = {"prompt": ["hi", "you"], "n": 2, "max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "stream": streamed}
    with serving(FakeEngine(), tracer=tracer) as client:
        answer = client.post(COMPLETIONS, asked, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert answer.status == 200
        first, second = spans(exporter, 2)
    assert [span.attributes["gen_ai.usage.prompt_tokens"] for span in (first, second)] == [2, 3]
    assert f"{first.context.trace_id:032x}" == f"{second.context.trace_id:032x}" == TRACE
    assert (f"{first.parent.span_id:016x}", first.name, first.kind.name) == (PARENT, "llm_request", "SERVER")
    said = dict(first.attributes)
    assert said["gen_ai.request.id"].startswith("cmpl-")
    # Each of the two answers is two steps of three letters, two of which were drafts.
    expected = {
        "gen_ai.response.model": "fake", "gen_ai.request.max_tokens": 6, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 2, "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.completion_tokens": 12, "gen_ai.usage.cached_tokens": 1,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "jaxspec.speculation.num_drafts": 4, "jaxspec.speculation.num_draft_tokens": 8,
        "jaxspec.speculation.num_accepted_tokens": 8, "jaxspec.speculation.mean_acceptance_length": 3.0,
    }  # fmt: skip
    assert {name: said.get(name) for name in expected} == expected
    assert first.end_time > first.start_time
    assert first.status.is_ok or first.status.is_unset


def test_without_a_header_a_trace_begins_and_an_unsampled_one_is_left_alone(memory):
    tracer, exporter = memory
    with serving(FakeEngine(), tracer=tracer) as client:
        client.post(COMPLETIONS, {"prompt": "hi"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        client.post(COMPLETIONS, {"prompt": "hi"}, headers={"traceparent": "nonsense"})
        (span,) = spans(exporter, 1)
    assert span.parent is None


def test_who_leaves_and_what_fails_end_their_spans(memory):
    tracer, exporter = memory
    engine = FakeEngine(block=1)
    with serving(engine, tracer=tracer) as client:
        engine.hold = True
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as connection:
            body = b'{"prompt": "hi", "stream": true}'
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            connection.sendall(body)
            assert b"200 OK" in connection.recv(200)
        (left,) = spans(exporter, 1)
        assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)
        assert left.attributes["gen_ai.usage.completion_tokens"] < len(ANSWER)
        assert not left.status.description
        engine.hold, engine.fail_after_steps = False, 2
        exporter.clear()
        client.stream(COMPLETIONS, {"prompt": "hi"})
        (failed,) = spans(exporter, 1)
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "RuntimeError: secret detail")
    assert failed.attributes["gen_ai.usage.completion_tokens"] == 2


def test_latencies_are_between_their_two_times():
    stats = AcceptanceStats(0).as_dict()
    times = RequestMetrics(10.0, 13.0, 20.0, stats, first_scheduled_time=11.5)
    output = RequestOutput("r", None, [1], [CompletionOutput(0, "", [1, 2], "stop")], True, times)
    found = {name: value for name, value in _figures(output).items() if ".latency." in name}
    assert found == {
        "gen_ai.latency.e2e": 10.0, "gen_ai.latency.time_in_queue": 1.5, "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_model_prefill": 1.5, "gen_ai.latency.time_in_model_decode": 7.0,
        "gen_ai.latency.time_in_model_inference": 8.5,
    }  # fmt: skip
    waiting = RequestOutput("r", None, [1], [], True, RequestMetrics(10.0, None, 12.0, stats))
    assert {name for name in _figures(waiting) if ".latency." in name} == {"gen_ai.latency.e2e"}
    assert not any("speculation" in name for name in _figures(waiting))
    assert NUM_SPEC_TOKENS > 0


def test_it_is_imported_only_where_asked_for(monkeypatch, capsys):
    assert open_tracer(None) is None
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigError, match=r"jaxspec\[otel\]"):
        open_tracer("http://localhost:4318/v1/traces")
    assert main(["no-such-model", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"]) == 2
    assert "jaxspec[otel]" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="http://HOST:4318"):
        open_tracer("grpc://localhost:4317")


def test_spans_are_sent_as_otlp_over_http(monkeypatch):
    """To a collector that is there, with what is left when the server ends."""
    pytest.importorskip(EXPORTER, reason="OpenTelemetry's packages are not here")
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
            tracer = open_tracer(ServerConfig(otlp_traces_endpoint=endpoint).otlp_traces_endpoint)
            with serving(FakeEngine(), tracer=tracer) as client:
                assert client.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3}).status == 200
            tracer.close()
        finally:
            collector.shutdown()
            thread.join()
    ((path, body),) = received
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    names = {one.key: one.value.string_value for one in sent.resource.attributes}
    assert (path, names["service.name"]) == ("/v1/traces", "mine")
    assert [span.name for span in sent.scope_spans[0].spans] == ["llm_request"]
