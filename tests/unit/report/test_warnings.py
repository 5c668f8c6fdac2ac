"""What a reader should know before trusting the figures."""

from __future__ import annotations

from typing import Any

import pytest

from simtrain.scenario.files import from_mapping
from simtrain.simulate import simulate


@pytest.mark.parametrize(("seq_len", "said"), [(8192, False), (1_048_576, True)])
def test_a_utilisation_above_one_is_explained(seq_len: int, said: bool) -> None:
    """By the convention of the published figures a causal kernel does work that it skips: long sequences exceed 1."""
    document: dict[str, Any] = {
        "cluster": {"accelerator": "GB200", "devices": 4},
        "model": "llama3-8b",
        "training": {"micro_batch": 1, "seq_len": seq_len, "attention": "cudnn"},
    }
    summary = simulate(from_mapping(document)).summary
    assert (summary["hfu"] > 1.0) is said
    assert any("HFU above 1" in warning for warning in summary["warnings"]) is said
