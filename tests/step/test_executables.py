"""Host. Programs kept on disk: the same program comes back, or none; never one for something else."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxspec.step import executables, programs
from jaxspec.step.executables import ExecutableStore


@struct.dataclass
class State:
    count: jax.Array
    rows_R: jax.Array


def state(rows=3):
    return State(count=jnp.int32(4), rows_R=jnp.arange(rows, dtype=jnp.float32))


@functools.partial(jax.jit, donate_argnums=0)
def step(state, add):
    return State(count=state.count + 1, rows_R=state.rows_R + add), {"sum": state.rows_R.sum()}


@pytest.fixture
def filled(tmp_path):
    """The folder of a store that holds `step`."""
    store = ExecutableStore(tmp_path, ("one", 2))
    store.settle(state())
    assert store.load("step") is None
    store.save("step", step.lower(state(), np.float32(0)).compile())
    store.close()
    return tmp_path


def test_what_jaxs_own_cache_had_is_not_kept(tmp_path):
    """XLA on CPU loads such a program once: written anew it lacks its kernels, and fails where it is called."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        lower = functools.partial(step.lower, state(rows=77), np.float32(0))
        lower().compile()
        step.clear_cache()
        jax.clear_caches()
        store = ExecutableStore(tmp_path, "once more")
        store.settle(state(rows=77))
        program, entry = programs._obtain(store, ("step", lower))
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    assert (entry.name, entry.was_kept) == ("step", False)
    assert program(state(rows=77), np.float32(1))[0].rows_R.shape == (77,)
    assert ExecutableStore(tmp_path, "once more").load("step") is None


def the_set(folder):
    (only,) = folder.iterdir()
    return only


def test_the_same_program_comes_back(filled):
    store = ExecutableStore(filled, ("one", 2))
    store.settle(state())
    program = store.load("step")
    given = state()
    after, seen = program(given, np.float32(2))
    assert (int(after.count), after.rows_R.tolist(), float(seen["sum"])) == (5, [2.0, 3.0, 4.0], 3.0)
    assert given.rows_R.is_deleted(), "the state is donated, as when it was compiled"
    assert store.load("step") is None, "handed over once"


def test_what_a_first_request_does_not_need_is_made_behind_the_start(filled):
    store = ExecutableStore(filled, ("one", 2), is_first=lambda name: False)
    store.settle(state())
    program = store.load("step")
    assert program.temp_bytes == executables.temp_bytes(step.lower(state(), np.float32(0)).compile())
    assert not program._making.done()
    store.close()
    assert int(program(state(), np.float32(2))[0].count) == 5


@pytest.mark.parametrize("can_compile", [True, False])
def test_what_cannot_be_made_of_a_whole_file_is_compiled_when_it_is_called(filled, caplog, monkeypatch, can_compile):
    def fail(*_, **__):
        raise ValueError("another XLA wrote this")

    monkeypatch.setattr(executables.serialize_executable, "deserialize_and_load", fail)
    store = ExecutableStore(filled, ("one", 2))
    store.settle(state())
    if not can_compile:
        with pytest.raises(ValueError, match="another XLA"):
            store.load("step")(state(), np.float32(2))
        return
    program, entry = programs._obtain(store, ("step", lambda: step.lower(state(), np.float32(0))))
    assert entry.was_kept
    with caplog.at_level(logging.WARNING):
        assert int(program(state(), np.float32(2))[0].count) == 5
    assert "another XLA wrote this" in caplog.text


def test_nothing_comes_back_for_other_facts(filled, monkeypatch):
    assert ExecutableStore(filled, ("one", 3)).load("step") is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    assert ExecutableStore(filled, ("one", 2)).load("step") is None
    monkeypatch.undo()
    monkeypatch.setattr(executables, "_source_digest", lambda: b"another version of the package")
    assert ExecutableStore(filled, ("one", 2)).load("step") is None


def test_nothing_comes_back_for_other_arrays(filled, caplog):
    store = ExecutableStore(filled, ("one", 2))
    with caplog.at_level(logging.WARNING):
        store.settle(state(rows=4))
    assert "for other arrays" in caplog.text
    assert store.load("step") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda _: b"x" * 9,
        lambda content: content[:-40] + b"?" + content[-39:],
    ],
)
def test_a_damaged_file_is_told_and_compiled_again(filled, caplog, damage):
    path = the_set(filled) / "step"
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        store = ExecutableStore(filled, ("one", 2))
        store.settle(state())
        assert store.load("step") is None
    assert str(path) in caplog.text


def test_what_was_not_finished_is_no_program(filled):
    (the_set(filled) / "unfinished-1").write_bytes(b"half")
    store = ExecutableStore(filled, ("one", 2))
    assert store.load("unfinished-1") is None


def test_the_sets_used_longest_ago_go(tmp_path):
    for number in range(10):
        store = ExecutableStore(tmp_path, number)
        store.settle(state())
        store.close()
    assert len(list(tmp_path.iterdir())) == 8


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = ExecutableStore(tmp_path / "file", "facts")
    with caplog.at_level(logging.WARNING):
        store.settle(state())
        store.save("step", step.lower(state(), np.float32(0)).compile())
        store.close()
    assert "is not kept" in caplog.text
