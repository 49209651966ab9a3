"""LangChain's own chat suites on `ChatMetaSD` over a tiny model in float32: all but what a random model cannot say."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from metasd_langchain import ChatMetaSD
from tests.unit.chatkit import MODEL, TOKENIZER

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


class TestTinyUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMetaSD

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "no/such-model"}  # nothing is loaded, and live objects have no JSON

    @pytest.mark.xfail(
        reason="langchain-core 1.8 revives by allowed_objects='all' only classes on a list of its own, on which no "
        "package from outside can be; test_chat.py revives with allowed_objects=[ChatMetaSD]",
        strict=True,
    )
    def test_serdes(self, *args: Any, **kwargs: Any) -> None:
        super().test_serdes(*args, **kwargs)


@pytest.mark.slow
class TestTinyIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMetaSD

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": (MODEL, TOKENIZER), "max_tokens": 120}

    @property
    def has_tool_calling(self) -> bool:
        return False  # it would have to copy arguments; test_chat_tools.py has what holds for any model

    @property
    def supports_json_mode(self) -> bool:
        return True
