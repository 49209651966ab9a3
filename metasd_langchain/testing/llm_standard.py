"""Standard tests for LangChain LLMs (``BaseLLM``), for which langchain-tests has none. Usable by any wrapper.

Needs pytest and pytest-asyncio with ``asyncio_mode = "auto"``. Derive in a test module::

    from metasd_langchain.testing.llm_standard import LLMIntegrationTests, LLMUnitTests


    class Mine:
        @property
        def llm_class(self):
            return MyLLM

        @property
        def llm_params(self):
            return {"model": "my-model"}


    class TestMyUnit(Mine, LLMUnitTests):
        pass


    class TestMyIntegration(Mine, LLMIntegrationTests):
        pass

What a wrapper cannot do it switches off (``supports_seed``, ``has_cache`` ... in `LLMTests`); the tests of it are
skipped. A single test that must fail for a reason is overridden under ``@pytest.mark.xfail(reason=...)``.
"""

from __future__ import annotations

import pytest

for _part in ("base", "watch", "unit", "answers", "callbacks", "life"):  # so that a failed assert shows its values
    pytest.register_assert_rewrite(f"metasd_langchain.testing.llm_{_part}")

from metasd_langchain.testing.llm_base import LLMTests  # noqa: E402
from metasd_langchain.testing.llm_integration import LLMIntegrationTests  # noqa: E402
from metasd_langchain.testing.llm_unit import LLMUnitTests  # noqa: E402

__all__ = ["LLMIntegrationTests", "LLMTests", "LLMUnitTests"]
