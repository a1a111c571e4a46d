"""Host. What a user may set of the HTTP server: where it listens, who may ask, how answers are read, how it ends."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jaxspec.config.base import StrictConfig
from jaxspec.errors import ConfigError

Key = Annotated[str, Field(min_length=1)]


class ServerConfig(StrictConfig):
    """Where and how the HTTP server listens. Keys are vLLM's where vLLM has one."""

    TITLE: ClassVar[str] = "server config"
    SECRETS: ClassVar[frozenset[str]] = frozenset({"api_key"})

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 opens it to the network")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    root_path: str = Field("", description="path under which a proxy shows this server")
    ssl_keyfile: str | None = Field(None, description="private key for HTTPS, a PEM file; goes with ssl_certfile")
    ssl_certfile: str | None = Field(None, description="certificate for HTTPS, a PEM file; goes with ssl_keyfile")
    ssl_ca_certs: str | None = Field(
        None, description="certificates that clients' own must be signed by, a PEM file; none are asked for"
    )
    api_key: Key | list[Key] | None = Field(
        None, repr=False, description="keys, one of which requests must bring as bearer token; several as a list"
    )
    api_key_file: str | None = Field(None, description="file of more such keys, one a line; # begins a comment")
    allowed_origins: list[str] = Field(
        [], description='origins whose pages may ask from a browser (CORS), ["*"] for all; none'
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="largest request body, in bytes; beyond it HTTP 413")
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="longest wait for a request's head, and then its body, in seconds; then HTTP 408; and for a client "
        "to take more of its answer",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="longest time for an answer, in seconds; then it ends with HTTP 504; null: none"
    )
    retry_after_s: int = Field(1, ge=0, description="Retry-After of HTTP 429 while the queue is full, in seconds")
    stuck_after_s: float = Field(
        120.0, gt=0, description="seconds in one step of the engine after which /health calls it stuck"
    )
    shutdown_timeout_s: int = Field(
        60, ge=0, description="seconds that open requests may go on once the server is asked to end; then they are cut"
    )
    chat_template: str | None = Field(
        None, description="chat template in place of the model's own: a file, or its text"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template teaches"
    )
    reasoning_parser: Literal["qwen3", "deepseek_r1"] | None = Field(
        None,
        description="tell what stands within <think> tags from content; deepseek_r1: answers begin there; null: do not",
    )
    startup_probe_tokens: int = Field(
        24, ge=0, description="tokens of three short answers by which the drafter is judged, for the log; 0: no probe"
    )
    profiler_dir: str | None = Field(
        None, description="folder for JAX profiler traces; turns on POST /start_profile and /stop_profile"
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="where OpenTelemetry traces go, OTLP over HTTP: http://HOST:4318/v1/traces; needs jaxspec[otel]; "
        "null: nowhere",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much is logged")
    log_format: Literal["text", "json"] = Field("text", description="lines for people, or a JSON object a line")

    @classmethod
    def normalize(cls, data: dict[str, Any]) -> dict[str, Any]:
        if (data.get("ssl_keyfile") is None) != (data.get("ssl_certfile") is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together; give both or neither")
        if data.get("ssl_ca_certs") is not None and data.get("ssl_certfile") is None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile and ssl_keyfile; give them")
        return data
