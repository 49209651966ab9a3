"""What the applications' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from metasd_langchain.models.eagle_format import save_eagle
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.training.places import DOMAINS, OFA
from tests.eagles import random_head


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with a tiny model whose window is long enough for a chat with tools."""
    made = tmp_path_factory.mktemp("tiny-chat")
    tiny_model(max_position_embeddings=8192).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return str(made)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model that the heads below are for."""
    made = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def target(folder: Path) -> Target:
    return load_target(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """A preset's folder, with random heads."""
    made = tmp_path_factory.mktemp("five")
    for seed, name in enumerate((*DOMAINS, OFA)):
        save_eagle(random_head(target, "eagle3 last state", seed=seed), made / name)
    return made
