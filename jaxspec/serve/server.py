"""Host. `jaxspec serve`: bind the port, start the engine beside the HTTP server, stop both when asked."""

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import uvicorn

from jaxspec.config.engine import EngineConfig, ServerConfig
from jaxspec.config.load import add_flags, gather, parse_flags, pick
from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.errors import ConfigError
from jaxspec.serve.app import create_app

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns the exit status: 0, 1 when the engine failed, 2 for a config that is wrong."""
    parser = argparse.ArgumentParser("jaxspec serve", description="An OpenAI-compatible server.", allow_abbrev=False)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    kinds = (EngineConfig, ServerConfig)
    add_flags(parser, kinds)
    try:
        args = parse_flags(parser, sys.argv[1:] if argv is None else argv)
        if args.positional_model is not None:
            args.model = args.positional_model
        data = gather(kinds, args)
        engine_config, server_config = pick(EngineConfig, data), pick(ServerConfig, data)
        listening = bind(server_config.host, server_config.port)
    except ConfigError as error:
        print(f"jaxspec serve: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=server_config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for chatty in ("jax", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return serve(engine_config, server_config, listening)


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


def serve(engine_config: EngineConfig, server_config: ServerConfig, listening: socket.socket) -> int:
    """Run the server on a bound socket until a signal stops it or the engine fails to start."""
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

    app = create_app(engine, server_config, lifespan)
    config = uvicorn.Config(
        app, log_config=None, lifespan="on", timeout_graceful_shutdown=GRACE_SECONDS, access_log=False
    )
    server = uvicorn.Server(config)
    host, port = listening.getsockname()[:2]
    logger.info("listening on http://%s:%d, starting the engine", f"[{host}]" if ":" in host else host, port)
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has shut down
        server.run(sockets=[listening])
    if engine.is_healthy and not engine.is_ready:
        # NOTE: interrupted while it compiles. XLA cannot be asked to stop: a usual exit would wait for it, and abort.
        logging.shutdown()
        os._exit(INTERRUPTED)
    for error in failures:  # the engine has logged it; this is the last line, for whoever looks there
        print(f"jaxspec serve: the engine did not start: {error}", file=sys.stderr)
    return 1 if failures else 0
