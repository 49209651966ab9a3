"""LangChain's own chat suites on `ChatMetaSD()`, the real embedded model, with every capability switched on.

A base model of 270M parameters: that it passes is the grammar's doing and the plain template's.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from metasd_langchain import ChatMetaSD

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
]
_LOADED: list[BaseChatModel] = []  # keeps the weights loaded between tests


class TestEmbeddedIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMetaSD

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 160}

    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        if not _LOADED:
            chat = ChatMetaSD()
            chat.warmup()
            _LOADED.append(chat)

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "gemma-3-270m"
