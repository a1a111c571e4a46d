"""Host. The drafters that come with the package: found by target and method, refused by name where there are none."""

import json

import pytest

from jaxspec.config import shipped
from jaxspec.config.engine import EngineConfig
from jaxspec.config.shipped import FOLDER, SHIPPED, Shipped
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.errors import ConfigError
from jaxspec.weights.aliases import ALIASES

MOST_BYTES = 40 * 10**6


@pytest.fixture
def stand_in(monkeypatch):
    """A table of one drafter, for target `some/target`."""
    monkeypatch.setattr(shipped, "SHIPPED", {"some/target": {"eagle3": Shipped("head", 3)}})
    return str(FOLDER / "head")


def settled(target, **speculative):
    return EngineConfig(model=target, speculative_config=speculative).speculative_config


@pytest.mark.parametrize("method", ["eagle3", "ngram+eagle3"])
@pytest.mark.parametrize("target", ["some/target", "Some/Target"])
def test_a_method_alone_takes_the_drafter_and_the_drafts_of_its_card(stand_in, target, method):
    found = settled(target, method=method)
    assert (found.method, found.model, found.num_speculative_tokens) == (method, stand_in, 3)
    assert settled(target, method=method, num_speculative_tokens=5).num_speculative_tokens == 5
    assert settled(target, method=method, num_speculative_tokens="auto").num_speculative_tokens == "auto"


def test_what_is_said_stands(stand_in):
    assert settled("some/target", method="eagle3", model="mine") == SpeculativeConfig(method="eagle3", model="mine")
    assert settled("other", method="eagle3", model="mine").model == "mine"
    assert settled("some/target", method="ngram", num_speculative_tokens=2).model is None


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("other", {"method": "eagle3"}),
        ("other", {"method": "ngram+eagle3"}),
        ("some/target", {"method": "medusa"}),
        ("some/target", {"method": "eagle3", "parallel_drafting": True}),
        ("some/target", {"method": "draft_model", "num_speculative_tokens": 3}),
    ],
)
def test_what_does_not_come_with_the_package_is_refused_by_name(stand_in, target, given):
    with pytest.raises(ConfigError, match=r"needs 'model'.*eagle3 for some/target") as caught:
        settled(target, **given)
    assert target == "some/target" or repr(target) in str(caught.value)


def test_what_ships_is_there_with_its_cards():
    """Under every name of the target; and nothing else lies in the package."""
    for name, alias in ALIASES.items():
        assert SHIPPED.get(name) is SHIPPED.get(alias.repository.lower())
    folders = {drafter.folder for drafters in SHIPPED.values() for drafter in drafters.values()}
    assert {path.name for path in FOLDER.iterdir()} == folders
    for folder in folders:
        assert {path.name for path in (FOLDER / folder).iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert json.loads((FOLDER / folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= MOST_BYTES
    for target, drafters in SHIPPED.items():
        for method in drafters:
            assert settled(target, method=method).model == str(FOLDER / drafters[method].folder)
