"""Host. T15: what is wrong with a drafter's files is an error that names it, a line in the log, or, in
`tests/tools/test_doctor.py`, found by the doctor; one table for every method."""

import pytest

from jaxspec.config.methods import METHODS
from jaxspec.errors import JaxspecError
from tests.oracle import knowing
from tests.tools.mutations import TABLE, Mutation, cases, load_pair, write_pair


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return knowing.write_target(tmp_path_factory.mktemp("mutations") / "target")


@pytest.mark.parametrize(("method", "mutation"), cases(lambda mutation: mutation.refused))
def test_refused_by_name(method, mutation, target, tmp_path):
    pair = write_pair(tmp_path, method, mutation, target)
    with pytest.raises(JaxspecError) as caught:
        load_pair(*pair)
    assert [word for word in mutation.refused if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(("method", "mutation"), cases(lambda mutation: mutation.logged))
def test_loads_and_says_how(method, mutation, target, tmp_path, caplog):
    with caplog.at_level("INFO", logger="jaxspec"):
        config, _ = load_pair(*write_pair(tmp_path, method, mutation, target))
    assert config.speculative_config is not None
    assert [line for line in caplog.messages if all(word in line for word in mutation.logged)], caplog.messages


@pytest.mark.parametrize("method", TABLE)
def test_what_is_right_loads(method, target, tmp_path, caplog):
    _, parts = load_pair(*write_pair(tmp_path, method, Mutation(), target))
    assert parts.config.speculative_config.method == method


def test_every_method_with_files_has_ten():
    """Of a draft model nothing is left to the doctor here but the rotation, which its own test tells."""
    for method, mutations in TABLE.items():
        assert METHODS[method].is_built
        assert len(mutations) >= 10
        found = [bool(mutation.named or mutation.useless) for mutation in mutations.values()]
        assert any(found) or method == "draft_model"
        others = [one for one, is_found in zip(mutations.values(), found, strict=True) if not is_found]
        assert all(mutation.refused or mutation.logged for mutation in others)
