"""Host. `jaxspec serve`: bind the port, start the engine beside the HTTP server, stop both when asked."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import uvicorn

from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import add_flags, as_yaml, gather, parse_flags, pick
from jaxspec.config.server import ServerConfig
from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.engine.build import build
from jaxspec.engine.hosts import is_follower
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.serve.access import JsonFormatter, keys_of
from jaxspec.serve.app import create_app, read_chat_template
from jaxspec.serve.connections import protocol
from jaxspec.serve.tracing import RequestTracer, open_tracer

logger = logging.getLogger(__name__)

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; of a job of several processes only process 0 does, and the others work for it.

    Returns the exit status: 0, 1 when the engine failed, 2 for a config that is wrong.
    """
    parser = argparse.ArgumentParser("jaxspec serve", description="An OpenAI-compatible server.", allow_abbrev=False)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--print-config", action="store_true", help="print what files, JAXSPEC_ variables and flags come to, and end"
    )
    kinds = (EngineConfig, ServerConfig)
    add_flags(parser, kinds)
    try:
        args = parse_flags(parser, sys.argv[1:] if argv is None else argv)
        if args.positional_model is not None:
            args.model = args.positional_model
        data = gather(kinds, args, os.environ)
        engine_config, server_config = pick(EngineConfig, data), pick(ServerConfig, data)
        if args.print_config:
            print(as_yaml([engine_config, server_config]), end="")
            return 0
        keys_of(server_config)
        read_chat_template(server_config.chat_template)
        tracer = open_tracer(server_config.otlp_traces_endpoint)
        server = http_server(server_config)
        follows = is_follower(engine_config)
        listening = None if follows else bind(server_config.host, server_config.port)
    except ConfigError as error:
        print(f"jaxspec serve: {error}", file=sys.stderr)
        return 2
    _set_up_logging(server_config)
    if listening is None:
        return follow(engine_config)
    return serve(engine_config, server_config, server, listening, tracer)


def follow(config: EngineConfig) -> int:
    """In every process of a job but 0: no HTTP, the same programs as there, until that one ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX has taken it
    try:
        parts = build(config)
    except JaxspecError as error:
        print(f"jaxspec serve: {error}", file=sys.stderr)
        return 1
    # Whoever ends a job asks all of its processes: process 0 lets open requests go on first, and then ends the others.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.info("ready; host 0 answers")
    parts.follow()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket listening on host and port, before anything slow starts.

    Raises: ConfigError when the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on host {host!r}, port {port} ({reason}); choose another with --port, 0 takes a free one"
        ) from None
    return bound


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    server: uvicorn.Server,
    listening: socket.socket,
    tracer: RequestTracer | None = None,
) -> int:
    """Run the server on a bound socket until a signal stops it or the engine fails to start.

    After the first signal no connection is taken any more, and open requests go on for shutdown_timeout_s.
    """
    engine = AsyncEngine(engine_config, startup_probe_tokens=server_config.startup_probe_tokens)
    failures: list[BaseException] = []

    async def watch_start() -> None:
        """Stop the server when the engine cannot start; /health says 'starting' meanwhile."""
        while not engine.is_ready and engine.is_healthy:
            await asyncio.sleep(0.05)
        if not engine.is_ready:
            try:
                engine.wait_until_ready()
            except Exception as error:
                failures.append(error)
            server.should_exit = True

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        engine.start()
        watching = asyncio.create_task(watch_start())
        yield
        watching.cancel()
        if engine.is_ready:  # while it still compiles its thread cannot be asked to end; the process takes it along
            await asyncio.to_thread(engine.shutdown)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    server.config.app = create_app(engine, server_config, lifespan, tracer)
    host, port = listening.getsockname()[:2]
    scheme = "http" if server_config.ssl_certfile is None else "https"
    logger.info("listening on %s://%s:%d, starting the engine", scheme, f"[{host}]" if ":" in host else host, port)
    # uvicorn raises the signal again once it has shut down; whoever was asked to end, and has, ends with status 0.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if engine.is_healthy and not engine.is_ready:
        # NOTE: interrupted while it compiles. XLA cannot be asked to stop: a usual exit would wait for it, and abort.
        logging.shutdown()
        os._exit(INTERRUPTED)
    for error in failures:  # the engine has logged it; this is the last line, for whoever looks there
        print(f"jaxspec serve: the engine did not start: {error}", file=sys.stderr)
    return 1 if failures else 0


def http_server(config: ServerConfig) -> uvicorn.Server:
    """The HTTP server, without its application yet.

    Raises: ConfigError for a certificate or key that cannot be used.
    """
    settings = uvicorn.Config(
        app="",
        http=protocol(config.body_timeout_s),
        ws="none",
        log_config=None,
        lifespan="on",
        access_log=False,
        root_path=config.root_path,
        timeout_graceful_shutdown=config.shutdown_timeout_s,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    if config.ssl_certfile is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
            if config.ssl_ca_certs is not None:
                context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:  # ssl's own errors are such
            raise ConfigError(
                f"ssl_certfile {config.ssl_certfile!r}, ssl_keyfile {config.ssl_keyfile!r} or ssl_ca_certs "
                f"{config.ssl_ca_certs!r} cannot be used ({error}); give PEM files that fit together"
            ) from None
    return uvicorn.Server(settings)


def _set_up_logging(config: ServerConfig) -> None:
    handler = logging.StreamHandler()
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    for chatty in ("jax", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
