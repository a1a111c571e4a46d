"""Host. What a job is made of, in one process: links, calls as bytes, the watchdog."""

import queue
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.distributed import links
from jaxspec.distributed.links import Links
from jaxspec.distributed.watchdog import Watchdog
from jaxspec.errors import HostError
from jaxspec.step import pack
from jaxspec.step.commands import Wire, arguments_of

BATCH = pack.pack_batch([1, 0], [[3, 4], [7]], 4, 5, 3, survival=np.array([[0.5], [0.25]], np.float32),
                        seconds=np.zeros(2, np.float32))  # fmt: skip


@pytest.fixture
def three():
    """The links of three processes."""
    pairs = [socket.socketpair() for _ in range(2)]
    made = [Links(0, 3, {rank + 1: pair[0] for rank, pair in enumerate(pairs)})]
    made += [Links(rank + 1, 3, {0: pair[1]}) for rank, pair in enumerate(pairs)]
    yield made
    for one in made:
        one.close()


def test_everybody_gets_what_everybody_has_handed_in(three):
    found = [None] * 3

    def exchange(rank):
        found[rank] = three[rank].exchange(f"of {rank}".encode())

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[b"of 0", b"of 1", b"of 2"]] * 3


def test_who_fails_or_goes_while_the_job_starts_is_named(three):
    three[1].send(links.FAULT, b"host 1 cannot start: no such model")
    with pytest.raises(HostError, match="no such model"):
        three[0].exchange(b"")
    three[0].close()
    with pytest.raises(HostError, match="host 0 has gone"):
        three[2].exchange(b"")


def test_what_is_sent_is_heard_in_order_and_the_end_too(three):
    heard: queue.SimpleQueue = queue.SimpleQueue()
    three[0].listen(lambda *what: heard.put(what))
    three[2].send(b"x", bytes(3_000_000))
    three[2].send(b"y")
    three[2].close()
    assert [heard.get(timeout=10) for _ in range(3)] == [(2, b"x", bytes(3_000_000)), (2, b"y", b""),
                                                         (2, links.GONE, b"")]  # fmt: skip


def test_a_call_comes_as_it_was_made():
    weights, kept = {"target": jnp.ones(3)}, [jnp.zeros(1), jnp.arange(4)]
    program = jax.jit(lambda weights, batch, ids, number: ids + number).lower(weights, BATCH, kept[1], np.int32(7))
    compiled = program.compile()
    payload = Wire().pack("decode", (weights, BATCH, kept[1], np.int32(7)), weights, kept)
    name, described = Wire().unpack(payload)
    args = arguments_of(compiled, described, weights, None, kept)
    assert (name, args[0] is weights, args[2] is kept[1]) == ("decode", True, True)
    assert jax.tree.structure(args[1]) == jax.tree.structure(BATCH)
    for leaf, sent in zip(jax.tree.leaves(args[1]), jax.tree.leaves(BATCH), strict=True):
        assert leaf.dtype == np.asarray(sent).dtype
        np.testing.assert_array_equal(leaf, sent)
    np.testing.assert_array_equal(compiled(*args), np.arange(4) + 7)


@pytest.mark.parametrize("spoil", ["lost", "changed", "twice"])
def test_calls_that_are_not_those_sent_are_noticed(spoil):
    sender, receiver = Wire(), Wire()
    first, second = (sender.pack(name, (BATCH,), None, []) for name in ("a", "b"))
    if spoil == "changed":
        first = first[:-1] + bytes([first[-1] ^ 1])
    elif spoil == "twice":
        receiver.unpack(first)
    with pytest.raises(HostError, match="not those that host 0 has sent"):
        receiver.unpack(second if spoil == "lost" else first)


def test_the_watchdog_barks_once_at_the_oldest_open_step():
    barked: queue.SimpleQueue = queue.SimpleQueue()
    dog = Watchdog(0.05, lambda step, seconds: barked.put((step, seconds)))
    for number, name in ((1, "admit"), (2, "prefill"), (3, "rounds"), (4, "rounds")):
        dog.begin(number, name)
    dog.end(2)
    step, seconds = barked.get(timeout=10)
    assert step == "step 3 (rounds)"
    assert seconds > 0.05
    assert dog.oldest is not None
    assert dog.oldest[0] == "step 3 (rounds)"
    dog.end(4)
    assert dog.oldest is None
