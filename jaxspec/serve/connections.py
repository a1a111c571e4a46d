"""Host. How long a connection may stand idle on the client's side; uvicorn itself waits forever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_PIPELINED_BYTES = 64 * 1024
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def protocol(seconds: float) -> type[asyncio.Protocol]:
    """HTTP/1.1 over one connection, as uvicorn's own.

    A connection whose client has not said what it wants so many seconds after it could is answered with 408 and
    closed; one whose client takes nothing of its answer for as long is cut, which ends its requests. And whoever sends
    more while it is answered, a next request or a stray line, is still seen to leave: uvicorn would stop reading.
    """

    class PatientProtocol(H11Protocol):
        _asking: asyncio.TimerHandle | None = None  # from when a request may come until its head is there
        _taking: asyncio.TimerHandle | None = None  # while nothing more fits into what the client has yet to read

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._asking = self.loop.call_later(seconds, self._too_late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            is_asking = self.cycle is None or self.cycle.response_complete
            if is_asking and self._asking is None:
                self._asking = self.loop.call_later(seconds, self._too_late)
            elif self._asking is not None and not is_asking:
                self._asking.cancel()
                self._asking = None
            is_ahead = not is_asking and not self.cycle.more_body and self.flow.read_paused
            if is_ahead and len(self.conn.trailing_data[0]) < MAX_PIPELINED_BYTES:
                self.flow.resume_reading()

        def _too_late(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(TOO_LATE)
                self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._taking = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._taking is not None:
                self._taking.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._asking, self._taking):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

    return PatientProtocol
