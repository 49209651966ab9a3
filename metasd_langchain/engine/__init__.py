"""The engine: plan, score, settle. Knows neither LangChain nor OpenTelemetry."""
