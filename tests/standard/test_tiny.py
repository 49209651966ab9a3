"""The LLM standard suite on `MetaSDLLM` over a tiny model in float32."""

from typing import Any

from langchain_core.language_models import BaseLLM

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.llm_standard import LLMIntegrationTests, LLMUnitTests
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer

# With embeddings of its own at the output a random model does not repeat itself, so its answers can be told apart.
MODEL, TOKENIZER = tiny_model(seed=1, tie_word_embeddings=False), tiny_tokenizer()


class Tiny:
    """What both parts are configured with."""

    @property
    def llm_class(self) -> type[BaseLLM]:
        return MetaSDLLM

    @property
    def llm_params(self) -> dict[str, Any]:
        return {"model": (MODEL, TOKENIZER)}

    @property
    def long_params(self) -> dict[str, Any]:
        return {"max_tokens": 400, "temperature": 1.0}  # what is drawn at random is hard to draft, so it takes longer

    def work_done(self, llm: Any) -> int:
        return llm._load().rounds


class TestTinyUnit(Tiny, LLMUnitTests):
    @property
    def serdes_params(self) -> dict[str, Any]:
        return {"model": "no/such-model"}  # live objects have no JSON


class TestTinyIntegration(Tiny, LLMIntegrationTests):
    pass
