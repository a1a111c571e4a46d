"""Device. A proposer of the user's own: the documented examples run, and what is none is refused by name."""

import importlib
import re
import types
from pathlib import Path

import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.engine.custom import check_custom, load_custom
from jaxspec.proposers.base import no_proposer
from tests.lossless.engines import custom, make_engine
from tests.lossless.replay import HostReplay
from tests.lossless.test_every_proposer import histogram_of
from tests.quick import heavy_but

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "custom-proposers.md"
K = 3


@pytest.fixture
def my_drafts(tmp_path, monkeypatch):
    """Writes a module that can be imported, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source, name="my_drafts"):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
        return name

    yield write
    importlib.sys.modules.pop("my_drafts", None)


def pairs(ids, limit):
    """What followed the last two tokens the last time."""
    starts = [start for start in range(len(ids) - 2) if ids[start : start + 2] == ids[-2:]]
    return ids[starts[-1] + 2 :][:limit] if starts else []


# name: (method, what it guesses)
EXAMPLES = {
    "again": ("custom", lambda ids, limit: [ids[-1]] * limit),
    "Pairs": ("custom", pairs),
}


@pytest.mark.parametrize("name", heavy_but(EXAMPLES, lambda name: name == "again"))
def test_the_documented_examples_guess_what_they_say(name, spoken, my_drafts):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(blocks) == len(EXAMPLES)
    my_drafts("\n".join(blocks))
    method, guess = EXAMPLES[name]
    engine = make_engine(spoken, {"model": f"my_drafts.{name}", "num_speculative_tokens": K}, max_num_seqs=1)
    assert engine.config.speculative_config.method == method
    prompt = [3, 1, 3, 1, 3]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    output = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    wanted = histogram_of(K, prompt, list(output.outputs[0].token_ids), guess)
    assert output.metrics.speculative_decoding["acceptance_histogram"] == wanted
    assert sum(wanted) > 0


def load(path):
    return load_custom(types.SimpleNamespace(speculative_config=types.SimpleNamespace(model=path)))


GOOD = """
from jaxspec.proposers.base import no_proposer
from tests.lossless.replay import HostReplay
device, host = no_proposer(), HostReplay(3)
def make(resolved): return no_proposer()
class Made(HostReplay):
    def __init__(self, resolved): super().__init__(2)
"""


@pytest.mark.parametrize(("name", "num_tokens"), [("device", 0), ("host", 3), ("make", 0), ("Made", 2)])
def test_a_dotted_path_leads_to_a_proposer_or_to_what_makes_one(name, num_tokens, my_drafts):
    my_drafts(GOOD)
    assert load(f"my_drafts.{name}").num_tokens == num_tokens


BAD = {
    "it = 5": "must be a Proposer, a HostProposer or what makes one, got 5",
    "def it(resolved): return 5": "must give a Proposer or a HostProposer, got 5",
    "def it(): return 5": r"raised TypeError: .*called with one argument",
    "def it(resolved): return 1 / 0": "'my_drafts.it' raised ZeroDivisionError: division by zero",
    "class it:\n def __init__(self, resolved): raise RuntimeError('no disk')": "raised RuntimeError: no disk",
    "class it:\n def __init__(self, resolved): pass": "lacks the functions observe, propose, finish",
    "class It:\n num_tokens = 2\n observe = propose = print\nit = It()": "lacks the function finish",
    "from tests.lossless.replay import HostReplay\nit = HostReplay('4')": "num_tokens must be .* got '4'",
    "from jaxspec.proposers.base import no_proposer\nit = no_proposer()._replace(prefill=None)": "the function prefill",
    "from jaxspec.proposers.base import no_proposer\nit = no_proposer()._replace(commit=3)": "the function commit",
    "its = 3": "module 'my_drafts' has no 'it'; did you mean 'its'",
    "1 / 0": "importing 'my_drafts' .* raised ZeroDivisionError",
    "import no_such_thing": "importing 'my_drafts' .* raised ModuleNotFoundError.*no_such_thing",
    "it = ": "raised SyntaxError",
}


@pytest.mark.parametrize("source", BAD)
def test_what_is_no_proposer_is_refused_saying_why(source, my_drafts):
    my_drafts(source)
    with pytest.raises(ConfigError, match=BAD[source]):
        load("my_drafts.it")


@pytest.mark.parametrize("path", ["no_such_package.it", "no_such_package.module.it", ".it"])
def test_what_is_not_there_is_said(path):
    with pytest.raises(ConfigError, match="no file or folder of that name"):
        load(path)


def test_a_proposer_comes_from_one_place_and_is_one():
    named = SpeculativeConfig(model="my.path", num_speculative_tokens=2)
    check_custom(named, None)
    check_custom(SpeculativeConfig(**custom(2)), no_proposer())
    check_custom(SpeculativeConfig(**custom(2) | {"method": "ngram+custom"}), no_proposer())
    check_custom(None, None)
    for config, proposer in ((named, no_proposer()), (SpeculativeConfig(**custom(2)), None), (None, no_proposer())):
        with pytest.raises(ConfigError, match="'custom'"):
            check_custom(config, proposer)
    for proposer in (5, HostReplay, HostReplay(2.0)):
        with pytest.raises(ConfigError, match="argument `proposer`"):
            check_custom(SpeculativeConfig(**custom(2)), proposer)


def test_lookup_first_is_for_the_device(spoken):
    config = custom(2) | {"method": "ngram+custom"}
    with pytest.raises(ConfigError, match="'ngram\\+custom' needs a proposer that drafts on the device"):
        make_engine(spoken, config, proposer=HostReplay(2))
