"""Host. What PyTorch said with SmolLM2, and how much of it is certain."""

import json
from pathlib import Path

GOLDENS = Path(__file__).resolve().parent.parent / "data" / "goldens" / "smollm2_greedy.json"
TIE = 1e-3  # a lead below this may fall either way in another order of summation


def read_cases() -> list[dict]:
    return json.loads(GOLDENS.read_text())["cases"]


def assert_greedy(case: dict, token_ids) -> None:
    """These ids are the recorded ones, as far as they go or up to the first that a tie may change."""
    certain = next((at for at, gap in enumerate(case["gaps"]) if gap < TIE), len(case["gaps"]))
    certain = min(certain, len(token_ids))
    assert certain >= 64, case["id"]
    assert token_ids[:certain] == case["token_ids"][:certain], case["id"]
