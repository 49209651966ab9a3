"""What the applications' tests share."""

from __future__ import annotations

import pytest

from metasd_langchain.testing.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with a tiny model whose window is long enough for a chat with tools."""
    made = tmp_path_factory.mktemp("tiny-chat")
    tiny_model(max_position_embeddings=8192).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return str(made)
