import pytest
import small_models

import narrowgate as ng


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """A random model with a tokenizer (vocabulary 300), its end-of-text ids out of the way: (transformers' model, ours)."""
    folder = tmp_path_factory.mktemp("talker")
    theirs = small_models.build("qwen3_5_text", folder, seed=3, vocab_size=300, eos_token_id=0)
    small_models.byte_tokenizer(folder)
    return theirs, ng.load(folder)
