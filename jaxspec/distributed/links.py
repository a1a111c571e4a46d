"""Host. The connections of process 0 to the others: bytes in frames over TCP, beside what the devices exchange.

They are found through the coordination service of `jax.distributed`, which also hands out the secret that a connection
must begin with. Nothing that comes is more than JSON and plain arrays to whoever reads it.
"""

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax
from jax._src import distributed

from jaxspec.errors import HostError

_HEAD = struct.Struct("<cQ")  # kind, bytes that follow
_KEY = "jaxspec/hosts"
_JOIN_S = 300.0  # to find each other
VALUE, FAULT, GONE = b"V", b"F", b"G"  # of `exchange`; a reason to end; nothing more comes (told, never sent)


class Links:
    """Of one process: process 0 has one to each other, each other one to process 0."""

    def __init__(self, rank: int, num_hosts: int, sockets: dict[int, socket.socket]):
        self.rank, self.num_hosts = rank, num_hosts
        self._sockets = sockets
        self._sending = {other: threading.Lock() for other in sockets}
        self._readers: list[threading.Thread] = []

    def exchange(self, own: bytes) -> list[bytes]:
        """What every process has handed in, in the order of their numbers; before `listen`.

        Raises:
            HostError: another has failed or gone.
        """
        if self.rank != 0:
            self.send(VALUE, own)
            return [text.encode() for text in json.loads(self._value_of(0))]
        every = [own, *(self._value_of(rank) for rank in range(1, self.num_hosts))]
        self.send(VALUE, json.dumps([value.decode() for value in every]).encode())
        return every

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """To every process that this one has a link to; whoever has gone is told of by `listen`."""
        for rank in self._sockets:
            self._send_to(rank, kind, payload)

    def send_within(self, timeout_s: float, kind: bytes, payload: bytes = b"") -> None:
        """The same to each at once, going on when it takes longer: a process that is stopped takes nothing in."""
        args = (kind, payload)
        senders = [threading.Thread(target=self._send_to, args=(rank, *args), daemon=True) for rank in self._sockets]
        for sender in senders:
            sender.start()
        _join(senders, timeout_s)

    def listen(self, handle: Callable[[int, bytes, bytes], None]) -> None:
        """Call handle(rank, kind, payload) for whatever comes, in a thread a link; last of all with GONE."""
        for rank in self._sockets:
            reader = threading.Thread(target=self._read, args=(rank, handle), name=f"host-{rank}", daemon=True)
            self._readers.append(reader)
            reader.start()

    def wait_closed(self, timeout_s: float) -> None:
        """Until the others have closed their ends, or so long."""
        _join([reader for reader in self._readers if reader is not threading.current_thread()], timeout_s)

    def close(self) -> None:
        """Nothing is sent any more, and nothing read."""
        for one in self._sockets.values():
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _send_to(self, rank: int, kind: bytes, payload: bytes) -> None:
        with self._sending[rank], suppress(OSError):
            self._sockets[rank].sendall(_HEAD.pack(kind, len(payload)) + payload)

    def _read(self, rank: int, handle: Callable[[int, bytes, bytes], None]) -> None:
        while True:
            try:
                kind, payload = _receive(self._sockets[rank])
            except OSError:
                handle(rank, GONE, b"")
                return
            handle(rank, kind, payload)

    def _value_of(self, rank: int) -> bytes:
        try:
            kind, payload = _receive(self._sockets[rank])
        except OSError:
            raise HostError(f"host {rank} has gone while the job started; its own log says why") from None
        if kind == FAULT:
            raise HostError(payload.decode())
        return payload


def connect() -> Links:
    """Link this process with the others; all of them call this.

    Raises:
        HostError: they did not come.
    """
    rank, num_hosts, job = jax.process_index(), jax.process_count(), distributed.global_state
    assert job.client is not None
    assert job.coordinator_address is not None
    if rank == 0:
        token = secrets.token_hex(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as listening:
            listening.settimeout(_JOIN_S)
            try:
                job.client.key_value_set(_KEY, f"{listening.getsockname()[1]} {token}")
            except jax.errors.JaxRuntimeError as error:
                raise HostError(f"a job has one engine, and this is another ({error}); start a job for each") from error
            return Links(0, num_hosts, _accept(listening, token, num_hosts))
    try:
        port, token = job.client.blocking_key_value_get(_KEY, int(_JOIN_S * 1000)).split()
        host = job.coordinator_address.rsplit(":", 1)[0].strip("[]")
        own = socket.create_connection((host, int(port)), timeout=_JOIN_S)
        own.sendall(_HEAD.pack(VALUE, len(token) + 8) + token.encode() + struct.pack("<Q", rank))
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise HostError(
            f"host {rank} cannot reach host 0 ({error}); let its ports be reached from all hosts"
        ) from error
    _keep(own)
    return Links(rank, num_hosts, {0: own})


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Wait for all of them, at most so long together."""
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _keep(link: socket.socket) -> None:
    """For as long as the job runs: nothing waits to be sent, and a machine that is off is noticed."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _accept(listening: socket.socket, token: str, num_hosts: int) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    while len(found) < num_hosts - 1:
        try:
            one, _ = listening.accept()
        except TimeoutError:
            lacking = sorted(set(range(1, num_hosts)) - set(found))
            raise HostError(f"hosts {lacking} have not come within {_JOIN_S:.0f} s; let host 0 be reached") from None
        one.settimeout(10.0)
        try:
            hello = _receive(one, most=1024)[1]
        except OSError:
            hello = b""
        if len(hello) == len(token) + 8 and secrets.compare_digest(hello[:-8], token.encode()):
            _keep(one)
            found[struct.unpack("<Q", hello[-8:])[0]] = one
        else:  # somebody else's
            one.close()
    return found


def _receive(source: socket.socket, most: int = 2**40) -> tuple[bytes, bytes]:
    """(kind, payload). Raises OSError when the other end has closed."""
    kind, length = _HEAD.unpack(_exactly(source, _HEAD.size))
    if length > most:
        raise OSError("not a frame")
    return kind, _exactly(source, length)


def _exactly(source: socket.socket, length: int) -> bytes:
    parts: Sequence[bytes] = ()
    while length > 0:
        part = source.recv(min(length, 2**20))
        if not part:
            raise OSError("closed")
        parts = (*parts, part)
        length -= len(part)
    return b"".join(parts)
