"""Who watches: sinks that turn a call's summary into spans, counters or rows. The engine knows none of them.

``attributes.py`` builds the span attributes (pure), ``otel.py`` is the only module that speaks OpenTelemetry.
"""
