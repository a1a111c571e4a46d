"""Host. Counts every compilation of the process, so that "nothing compiles after ready" is a number."""

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


class _CompileCount:
    """JAX's monitoring is one per process and never forgets a listener, so this is the one place with process state."""

    def __init__(self):
        self._lock = threading.Lock()
        self._count = 0
        self._is_listening = False
        self._of_thread = threading.local()  # a program is compiled, or read, in the thread that asks for it

    def start(self) -> None:
        with self._lock:
            if not self._is_listening:
                jax.monitoring.register_event_duration_secs_listener(self._on_event)
                jax.monitoring.register_event_listener(self._on_hit)
                self._is_listening = True

    def _on_event(self, event: str, duration_secs: float, **kwargs) -> None:
        del duration_secs, kwargs
        if event == _EVENT:
            with self._lock:
                self._count += 1

    def _on_hit(self, event: str, **kwargs) -> None:
        del kwargs
        if event == _HIT:
            self._of_thread.hits = self.hits() + 1

    def hits(self) -> int:
        return getattr(self._of_thread, "hits", 0)

    def read(self) -> int:
        with self._lock:
            return self._count


_COUNT = _CompileCount()


def compile_count() -> int:
    """Backend compilations (persistent-cache hits included) since the first call in this process."""
    _COUNT.start()
    return _COUNT.read()


def cache_hits() -> int:
    """Of those, the ones that this thread asked for and JAX's persistent cache had."""
    _COUNT.start()
    return _COUNT.hits()
