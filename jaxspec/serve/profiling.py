"""Host. `/start_profile` and `/stop_profile`: traces of JAX's own profiler, one at a time."""

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.serve.errors import HttpError, JsonResponse


class Profiler:
    """Writes traces into a folder; TensorBoard and Perfetto read them."""

    def __init__(self, folder: str):
        self._folder = folder
        self._is_running = False

    async def start(self, request: Request) -> Response:
        """POST /start_profile: 409 while a trace runs."""
        if self._is_running:
            raise HttpError(409, "a trace is running; end it with /stop_profile")
        self._is_running = True
        try:
            await anyio.to_thread.run_sync(_start, self._folder)
        except BaseException:
            self._is_running = False
            raise
        return JsonResponse({"status": "started", "folder": self._folder})

    async def stop(self, request: Request) -> Response:
        """POST /stop_profile: 409 where none runs."""
        if not self._is_running:
            raise HttpError(409, "no trace is running; begin one with /start_profile")
        self._is_running = False
        await anyio.to_thread.run_sync(_stop)
        return JsonResponse({"status": "stopped", "folder": self._folder})


def _start(folder: str) -> None:
    import jax.profiler

    jax.profiler.start_trace(folder)


def _stop() -> None:
    import jax.profiler

    jax.profiler.stop_trace()
