"""Measures what metasd-langchain claims: ``python -m evaluators COMMAND``. README.md defines every figure."""
