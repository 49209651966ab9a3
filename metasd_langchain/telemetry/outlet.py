"""The span processor of the provider that ``setup_telemetry`` makes. Needs the SDK (extra ``otel``)."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

__all__ = ["Outlet"]


class Outlet(SpanProcessor):
    """Hands spans to the processors there are at the moment: a provider outlives them, and gives none of its own back.

    Attributes:
        provider: whose processor it is.
        processors: who gets the spans; empty while nothing is set up.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self.processors: Sequence[SpanProcessor] = ()

    def on_end(self, span: ReadableSpan) -> None:
        """See OpenTelemetry."""
        for processor in self.processors:
            processor.on_end(span)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See OpenTelemetry."""
        flushed = [processor.force_flush(timeout_millis) for processor in self.processors]
        return all(flushed)

    def shutdown(self) -> None:
        """See OpenTelemetry."""
        for processor in self.processors:
            processor.shutdown()
