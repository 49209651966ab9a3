"""The tiny target all laws are tested on, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metasd_langchain.engine.loop import Engine
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target((tiny_model(), tiny_tokenizer()))


@pytest.fixture(scope="session")
def engine(target: Target) -> Iterator[Engine]:
    engine = Engine(target)
    yield engine
    engine.close()
