"""What every LLM must do when it answers: all suites that ask the model."""

from __future__ import annotations

from metasd_langchain.testing.llm_answers import LLMAnswerTests
from metasd_langchain.testing.llm_callbacks import LLMCallbackTests
from metasd_langchain.testing.llm_life import LLMLifeTests

__all__ = ["LLMIntegrationTests"]


class LLMIntegrationTests(LLMAnswerTests, LLMCallbackTests, LLMLifeTests):
    """Answers, callbacks and life of a model that is there."""
