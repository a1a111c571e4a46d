"""Host. OpenTelemetry: a span for every prompt that is answered, under vLLM's names. Imported only where asked for."""

import importlib
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from jaxspec.engine.outputs import RequestOutput
from jaxspec.errors import ConfigError
from jaxspec.sampling.params import SamplingParams

SPAN_NAME = "llm_request"
# Attribute -> key of the speculative figures that a response has too.
SPECULATION = {
    "jaxspec.speculation.num_drafts": "num_spec_steps",
    "jaxspec.speculation.num_draft_tokens": "num_draft_tokens",
    "jaxspec.speculation.num_accepted_tokens": "num_accepted_draft_tokens",
    "jaxspec.speculation.mean_acceptance_length": "mean_acceptance_length",
    "jaxspec.speculation.tokens_per_round": "tokens_per_round",
}


class RequestTracer:
    """Makes spans of outputs on their way to a client. They are sent in the background, by `provider`."""

    def __init__(self, provider: Any):
        """provider: an `opentelemetry.sdk.trace.TracerProvider`.

        Raises: ConfigError without OpenTelemetry's packages.
        """
        self._api = _imported("opentelemetry.trace")
        self._propagator = _imported("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("jaxspec")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    async def traced(
        self,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        *,
        headers: Mapping[str, str],
        model: str,
        request_id: str,
        params: SamplingParams,
        prompt_lens: Sequence[int],
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The same outputs. Each prompt's span begins now, below the client's own if a traceparent header names one,
        and ends with its last output; that of one who leaves, or of an error, where it stands."""
        parent = self._propagator.extract(dict(headers))
        asked = {
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
        asked = {name: value for name, value in asked.items() if value is not None}
        spans = {
            index: self._tracer.start_span(
                SPAN_NAME,
                context=parent,
                kind=self._api.SpanKind.SERVER,
                attributes=asked | {"gen_ai.request.id": f"{request_id}-{index}", "gen_ai.usage.prompt_tokens": length},
            )
            for index, length in enumerate(prompt_lens)
        }
        last: dict[int, RequestOutput] = {}
        try:
            async with aclosing(outputs):
                async for index, output in outputs:
                    last[index] = output
                    if output.finished and index in spans:
                        span = spans.pop(index)
                        span.set_attributes(_figures(output))
                        span.end()
                    yield index, output
        except Exception as error:
            for span in spans.values():
                span.set_status(self._api.StatusCode.ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            for index, span in spans.items():
                if index in last:
                    span.set_attributes(_figures(last[index]))
                span.set_attribute("gen_ai.response.finish_reasons", ["abort"])
                span.end()


def open_tracer(endpoint: str | None) -> RequestTracer | None:
    """A tracer that sends to an OTLP endpoint over HTTP; None without one. OpenTelemetry's own environment variables
    (headers, sampler, service name) hold.

    Raises: ConfigError for an endpoint of another kind, or without OpenTelemetry's packages.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint must be an http:// or https:// address of OTLP over HTTP, got {endpoint!r}; "
            "collectors usually have http://HOST:4318/v1/traces"
        )
    exporting = _imported("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    sdk, export = _imported("opentelemetry.sdk.trace"), _imported("opentelemetry.sdk.trace.export")
    resource = _imported("opentelemetry.sdk.resources").Resource.create(
        {"service.name": os.environ.get("OTEL_SERVICE_NAME", "jaxspec")}
    )
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(exporting.OTLPSpanExporter(endpoint=endpoint)))
    return RequestTracer(provider)


def _figures(output: RequestOutput) -> dict[str, Any]:
    """What an output says of its request so far; latencies in seconds, as vLLM's."""
    metrics = output.metrics
    now = metrics.finished_time or time.monotonic()
    arrival, scheduled, first = metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time
    spans = {
        "gen_ai.latency.e2e": (arrival, now),
        "gen_ai.latency.time_in_queue": (arrival, scheduled),
        "gen_ai.latency.time_to_first_token": (arrival, first),
        "gen_ai.latency.time_in_model_prefill": (scheduled, first),
        "gen_ai.latency.time_in_model_decode": (first, now),
        "gen_ai.latency.time_in_model_inference": (scheduled, now),
    }
    figures: dict[str, Any] = {
        "gen_ai.usage.completion_tokens": sum(len(one.token_ids) for one in output.outputs),
        "gen_ai.usage.num_sequences": len(output.outputs),
        "gen_ai.usage.cached_tokens": output.num_cached_tokens or 0,
    }
    figures |= {name: end - start for name, (start, end) in spans.items() if start is not None and end is not None}
    if output.finished:
        figures["gen_ai.response.finish_reasons"] = [one.finish_reason or "abort" for one in output.outputs]
    speculative = metrics.speculative_decoding
    if speculative["num_spec_tokens"]:
        figures |= {name: speculative[key] for name, key in SPECULATION.items()}
    return figures


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry's packages ({error}); pip install 'jaxspec[otel]', or leave "
            "it out"
        ) from None
