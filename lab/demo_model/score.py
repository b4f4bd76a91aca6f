"""Held-out bits per byte of the demo model through transformers, and samples from it.

    python lab/demo_model/score.py demo/model [float32|bfloat16]

Protocol: each document is encoded alone, END before it. Windows of 2048 tokens that do not overlap: window j reads tokens
[2048 j, 2048 (j + 1)) and predicts tokens [2048 j + 1, 2048 (j + 1) + 1), so every token of the document is predicted once and
END never is. Bits per byte = the sum over all documents of -log2 p, divided by the UTF-8 bytes of the text."""

import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgate.engine.held_out import held_out

WINDOW = 2048
PROMPTS = ("def fibonacci(n):\n", "import os\n\n", "class Stack:\n")


def windows(ids: list[int], size: int = WINDOW) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) pairs that predict every token but the first once."""
    return [(ids[i : i + size][: len(ids) - 1 - i], ids[i + 1 : i + size + 1]) for i in range(0, len(ids) - 1, size)]


@torch.no_grad()
def bits(model: torch.nn.Module, documents: list[list[int]]) -> float:
    """Sum of -log2 p over all tokens of all documents but their first; softmax in float32."""
    total = 0.0
    for document in documents:
        for inputs, targets in windows(document):
            logits = model(input_ids=torch.tensor([inputs]), use_cache=False).logits[0].float()
            nats = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum")
            total += nats.item() / math.log(2)
    return total


def main(folder: Path, dtype: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    text = held_out(folder)
    total = bits(model, [tokenizer(document).input_ids for document in text.documents])
    print(f"{total / text.nbytes:.4f} bits per byte, {dtype}, {text.nbytes} bytes, Python {text.python}, sha256 {text.sha256}")
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(0)
        for kind in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.95}):
            out = model.generate(**ids, max_new_tokens=160, **kind)[0]
            print("-" * 40, kind, "\n" + tokenizer.decode(out, skip_special_tokens=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "float32")
