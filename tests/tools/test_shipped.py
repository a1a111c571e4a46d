"""Device. The drafters that come with the package, named by their method alone, before `jaxspec verify` and doctor."""

import json

import pytest

from jaxspec.config.shipped import SHIPPED
from jaxspec.tools import doctor, verify

TARGET = "smollm2-135m-instruct"
SMALL = ("--num-prompts", "2", "--max-tokens", "24", "--max-model-len", "256", "--max-num-seqs", "2",
         "--dtype", "float32", "--json")  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("method", list(SHIPPED[TARGET]))
def test_it_changes_no_answer_and_is_no_misreading(method, capsys):
    words = (TARGET, "--speculative-config", json.dumps({"method": method}), *SMALL)
    assert verify.main([*words, "--temperature", "0"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["verdict"] == "lossless"
    assert report["acceptance"]["num_accepted_draft_tokens"] > 0
    assert doctor.main(list(words)) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["method"] == method
    assert not told.get("better")
