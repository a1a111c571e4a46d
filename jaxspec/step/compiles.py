"""Host. Counts every compilation of the process, so that "nothing compiles after ready" is a number."""

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _CompileCount:
    """JAX's monitoring is one per process and never forgets a listener, so this is the one place with process state."""

    def __init__(self):
        self._lock = threading.Lock()
        self._count = 0
        self._is_listening = False

    def start(self) -> None:
        with self._lock:
            if not self._is_listening:
                jax.monitoring.register_event_duration_secs_listener(self._on_event)
                self._is_listening = True

    def _on_event(self, event: str, duration_secs: float, **kwargs) -> None:
        del duration_secs, kwargs
        if event == _EVENT:
            with self._lock:
                self._count += 1

    def read(self) -> int:
        with self._lock:
            return self._count


_COUNT = _CompileCount()


def compile_count() -> int:
    """Backend compilations (persistent-cache hits included) since the first call in this process."""
    _COUNT.start()
    return _COUNT.read()
