"""The demo model: the same greedy text in float32 from transformers and from us."""

from pathlib import Path

import pytest
import torch

import narrowgate as ng

DEMO = Path(__file__).parents[2] / "demo" / "model"
pytestmark = pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in this checkout")


def test_greedy_text_equals_transformers():
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    ours = ng.load(DEMO)
    for prompt in ("def read_json(path):\n", "class Stack:\n    def __init__(self"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = theirs.generate(ids, max_new_tokens=48, do_sample=False)[0]
        assert ours.tokenizer.encode(prompt) == ids[0].tolist()
        assert ours.generate(prompt, max_new_tokens=48) == tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True)
