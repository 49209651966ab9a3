"""A tool loop whose state lives in SQLite."""
