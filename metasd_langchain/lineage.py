"""Which runs are around a call: LangChain tells a callback handler, and the recorder remembers while they last.

The handler is added to every run that begins while something records, and to none otherwise. It looks at ids and names
only, never at inputs or outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook

from metasd_langchain.telemetry import recorder, runs

__all__ = ["Lineage"]


class Lineage(BaseCallbackHandler):
    """Tells the recorder of chains, graph nodes, tools and retrievers as they begin and end."""

    # Not run_inline, though a node must be known before its model is called: it is awaited either way, and where one
    # handler runs inline langchain-core 1.8 tells the others nothing of an async LLM.

    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """A run began."""
        known = name or (serialized or {}).get("name") or "run"
        runs.note_run(str(run_id), "" if parent_run_id is None else str(parent_run_id), str(known))

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A run ended."""
        runs.forget_run(str(run_id))

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A run failed."""
        runs.forget_run(str(run_id))

    def on_tool_start(
        self,
        serialized: Mapping[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool began; models may be called inside."""
        name = kwargs.get("name")
        self.on_chain_start(serialized, None, run_id=run_id, parent_run_id=parent_run_id, name=name)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool ended."""
        runs.forget_run(str(run_id))

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool failed."""
        runs.forget_run(str(run_id))


_HANDLER = Lineage()


class _WhileRecording:
    """Stands where LangChain reads a context variable. A variable would be empty on threads that were started by hand,
    and a recording is the whole process's.
    """

    def get(self) -> Lineage | None:
        return _HANDLER if recorder.recording() else None


register_configure_hook(cast("ContextVar[BaseCallbackHandler | None]", _WhileRecording()), inheritable=True)
