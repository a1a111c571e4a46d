"""Host. One engine over several processes: process 0 schedules and tells the others each program that it runs, with the
arrays that it hands it; they run the same over their own devices, and read nothing back.

Who decides is one, so there is nothing to agree on while it runs. What every device has whole (tokens, lengths) must
still come out the same everywhere: digests of the tokens say so, some rounds later, and name the process that differs.
"""

import hashlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.distributed import links
from jaxspec.distributed.start import start
from jaxspec.distributed.watchdog import Watchdog
from jaxspec.errors import ConfigError, HostError
from jaxspec.step.commands import Wire, arguments_of, small_results
from jaxspec.step.programs import Programs
from jaxspec.step.state import DecodeState

logger = logging.getLogger(__name__)

DIGEST_EVERY = 16  # batches of rounds
GRACE_S = 2.0  # for the others to be heard, before this process says what it knows alone
_CALL, _END, _DIGEST, _ASK, _ANSWER = b"C", b"E", b"D", b"A", b"W"
_NEW_STATE = "new_state"
_HAND_ON = ("propose[", "forward[", "prefill[", "gather[", "prompt_logprobs")
# Of a config: what may differ between machines, and what the smallest of them settles for all.
_OWN = {"model", "tokenizer", "served_model_name", "compilation_cache_dir"}
_LEAST = {"num_pages", "max_model_len"}


def is_follower(config: EngineConfig) -> bool:
    """Whether this process has joined a job in which another one takes the requests.

    Raises:
        ConfigError: the processes do not come together.
    """
    start(config.nnodes, config.node_rank, config.master_addr, config.master_port)
    return config.nnodes != 1 and jax.process_index() > 0


class Hosts:
    """This process among the others of its job."""

    def __init__(self, found: links.Links, watchdog_timeout_s: float | None):
        """watchdog_timeout_s: the longest that a program may take; None: any time."""
        self._links = found
        self.rank, self.num_hosts = found.rank, found.num_hosts
        # Process 0 speaks first, since it can ask the others.
        own_s = watchdog_timeout_s if watchdog_timeout_s is None or self.leads else watchdog_timeout_s + 3 * GRACE_S
        self._watchdog = Watchdog(own_s, self._stalled)
        self._wire = Wire()
        self._weights: Any = None
        self._kept: list[jax.Array] = []
        self._num_calls = self._num_rounds = 0
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # a follower's; None: the end
        self._behind: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_behind, name="behind", daemon=True)
        self._digests: dict[int, dict[int, str]] = {}
        self._answers: dict[int, str] = {}
        self._telling = threading.Lock()
        self._is_over = False

    @classmethod
    def join(cls, config: EngineConfig) -> "Hosts | None":
        """Meet the others; None where this process is the only one.

        Raises:
            ConfigError, HostError: they do not come together.
        """
        start(config.nnodes, config.node_rank, config.master_addr, config.master_port)
        return None if jax.process_count() == 1 else cls(links.connect(), config.watchdog_timeout_s)

    @property
    def leads(self) -> bool:
        """Whether this process decides."""
        return self.rank == 0

    def agree(self, resolved: ResolvedConfig, facts: Mapping[str, str]) -> ResolvedConfig:
        """The config that all run: each its own paths, and the pages of the process with the fewest.

        facts: what else must be the same everywhere.

        Raises:
            ConfigError: a process has something else.
            HostError: a process has failed or gone.
        """
        own = {"facts": dict(facts), **resolved.model_dump(mode="json")}
        every = [json.loads(one) for one in self._links.exchange(json.dumps(own).encode())]
        for rank, one in enumerate(every):
            for what, theirs in _flat(one).items():
                ours = _flat(every[0]).get(what)
                if theirs != ours:
                    raise ConfigError(
                        f"all hosts of a job must have the same {what}, got {ours!r} on host 0 and {theirs!r} on host "
                        f"{rank}; start them with one config, version and model"
                    )
        least = min(every, key=lambda one: one["num_pages"])
        changes: dict[str, Any] = {name: least[name] for name in _LEAST}
        if resolved.speculative_config is not None:
            longest = least["speculative_config"]["max_model_len"]
            changes["speculative_config"] = resolved.speculative_config.model_copy(update={"max_model_len": longest})
        return resolved.model_copy(update=changes)

    def ready(self, programs: Programs, weights: Any) -> None:
        """Wait until all have loaded and compiled; from now on what process 0 runs, all run."""
        self._links.exchange(b"ready")
        self._weights = weights
        if self.leads:
            programs.runner = self._tell_and_run
        self._reader.start()
        self._links.listen(self._hear)

    def on_all(self, make: Callable[[], DecodeState]) -> Callable[[], DecodeState]:
        """Process 0's way to make a new state, with the others."""

        def make_on_all() -> DecodeState:
            self._tell(_NEW_STATE, ())
            return make()

        return make_on_all

    def follow(self, programs: Programs, state: DecodeState, new_state: Callable[[], DecodeState]) -> None:
        """Run what process 0 runs, until it ends the job. A failure of any process ends this one, with status 1."""
        held = [state]
        del state
        try:
            while (payload := self._calls.get()) is not None:
                name, described = self._wire.unpack(payload)
                if name == _NEW_STATE:
                    held.clear()  # there is no room for two
                    held.append(new_state())
                    continue
                program = programs.compiled(name)
                self._begin(name)
                own = held.pop() if "state" in described else None  # donated
                args = arguments_of(program, described, self._weights, own, self._kept)
                self._run(name, program, args, held.append)
        except Exception as error:
            self.fail(error)
        self._behind.put(None)
        self._reader.join()
        self._links.close()

    def end(self) -> None:
        """Process 0: the job is done, and all end with status 0."""
        if self.leads and not self._is_over and self._reader.is_alive():
            self._is_over = True
            self._links.send(_END)
            self._links.wait_closed(GRACE_S)

    def refuse(self, error: BaseException) -> None:
        """Tell the others, who may wait for this process, that it cannot start."""
        self._is_over = True
        reason = str(error) if isinstance(error, HostError) else f"host {self.rank} cannot start: {error}"
        self._links.send(links.FAULT, reason.encode())

    def fail(self, error: BaseException) -> NoReturn:
        """A program failed. What it left on the other hosts nobody knows, so all end, for a restart to serve again.

        A host that has gone makes the programs of all others fail, and is what is told then.
        """
        time.sleep(GRACE_S)
        step = self._watchdog.oldest
        self._end_all(f"host {self.rank} failed in {step[0] if step else 'no step'}: {error}")

    def _tell(self, name: str, args: tuple[Any, ...]) -> None:
        self._links.send(_CALL, self._wire.pack(name, args, self._weights, self._kept))

    def _tell_and_run(self, name: str, program: Any, args: tuple[Any, ...]) -> Any:
        self._begin(name)  # first, since a process that is stopped may take nothing in
        self._tell(name, args)
        return self._run(name, program, args)

    def _begin(self, name: str) -> None:
        self._num_calls += 1
        self._watchdog.begin(self._num_calls, name)

    def _run(
        self, name: str, program: Any, args: tuple[Any, ...], keep: Callable[[DecodeState], None] | None = None
    ) -> Any:
        results = program(*args)
        small = small_results(results, keep)
        # The parts of one round hand these on to each other, and a chunk's states those who read them; whatever else
        # runs, the round or the chunk is over.
        before = [] if name.startswith(("propose[", "prefill[")) else self._kept
        self._kept = [*before, *small] if name.startswith(_HAND_ON) else []
        self._behind.put((self._num_calls, name, small[0] if small else None))
        return results

    def _read_behind(self) -> None:
        """Wait for what runs, beside those who launch it."""
        digest = hashlib.blake2b(digest_size=16)
        while (item := self._behind.get()) is not None:
            number, name, first = item
            try:
                if first is not None:
                    first.block_until_ready()
                if name.startswith(("decode_rounds[", "verify_commit[", "judge_commit[")):
                    digest.update(np.asarray(first).tobytes())  # `RoundOutput.packed_BX`
                    self._num_rounds += 1
                    if self._num_rounds % DIGEST_EVERY == 1:
                        self._say_digest(self._num_rounds, digest.hexdigest())
            except Exception as error:
                self.fail(error)
            self._watchdog.end(number)

    def _say_digest(self, count: int, digest: str) -> None:
        if self.leads:
            self._compare(0, count, digest)
        else:
            self._links.send(_DIGEST, json.dumps([count, digest]).encode())

    def _compare(self, rank: int, count: int, digest: str) -> None:
        with self._telling:
            found = self._digests.setdefault(count, {})
            found[rank] = digest
            if len(found) < self.num_hosts:
                return
            del self._digests[count]
        # The most are right; of two, process 0.
        right = max(Counter(found.values()).items(), key=lambda one: (one[1], one[0] == found[0]))[0]
        wrong = [rank for rank, one in sorted(found.items()) if one != right]
        if wrong:
            self._end_all(
                f"{_named(wrong)} made other tokens than the others in the first {count} batches of rounds; its "
                "memory, its device or its copy of the model is at fault"
            )

    def _hear(self, rank: int, kind: bytes, payload: bytes) -> None:
        """Something came from a process."""
        if kind == _CALL:
            self._calls.put(payload)
        elif kind == _END:
            self._is_over = True
            self._calls.put(None)
        elif kind == _DIGEST:
            self._compare(rank, *json.loads(payload))
        elif kind == _ASK:
            step = self._watchdog.oldest
            self._links.send(_ANSWER, (step[0] if step else "no step").encode())
        elif kind == _ANSWER:
            self._answers[rank] = payload.decode()
        elif kind == links.FAULT:
            self._end_all(payload.decode())
        elif kind == links.GONE and not self._is_over:
            self._end_all(f"host {rank} has gone; its own log says why")

    def _stalled(self, step: str, seconds: float) -> None:
        said = f"{step} has not ended on host {self.rank} for {seconds:.0f} s (watchdog_timeout_s)"
        if self.leads:
            self._links.send_within(GRACE_S, _ASK)
            time.sleep(GRACE_S)
            silent = [rank for rank in range(1, self.num_hosts) if rank not in self._answers]
            others = [f"host {rank} is in {other}" for rank, other in sorted(self._answers.items())]
            said = "; ".join([said, *([f"{_named(silent)} does not answer"] if silent else []), *others])
        self._end_all(said)

    def _end_all(self, reason: str) -> NoReturn:
        """Tell the others, say it on the last line, and end: whoever waits for a device cannot be asked to."""
        if not self._telling.acquire(timeout=GRACE_S):
            threading.Event().wait()  # another thread is ending this process
        self._is_over = True
        self._links.send_within(GRACE_S, links.FAULT, reason.encode())
        if self.leads:  # with process 0 goes the coordination service, which others must not miss first
            self._links.wait_closed(GRACE_S)
        logging.shutdown()
        print(f"jaxspec: host {self.rank} of {self.num_hosts} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config must be the same everywhere, nested keys with dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": one for name, one in _flat(value).items()}
        elif key not in _OWN | _LEAST:
            flat[key] = value
    return flat


def _named(ranks: list[int]) -> str:
    return f"host{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
