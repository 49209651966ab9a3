"""Texts of an answer's tokens, one after another."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Texts", "TokenText"]

TokenText = Callable[[int], tuple[str, bytes]]


class Texts:
    """Texts of tokens one after another; a character of several tokens belongs to the one that completes it."""

    def __init__(self, token_text: TokenText | None) -> None:
        self._token_text = token_text
        self._known: dict[int, tuple[str, bytes]] = {}
        self._begun = b""

    def next(self, token: int) -> str | None:
        """The next token's text; None without a tokenizer, "" while its character is not complete."""
        if self._token_text is None:
            return None
        if token not in self._known:
            try:
                self._known[token] = self._token_text(token)
            except Exception:  # noqa: BLE001 - a tokenizer that cannot name a token costs its text, not the line
                self._known[token] = ("", b"")
        shown, raw = self._known[token]
        if not self._begun and shown.encode(errors="replace") == raw:
            return shown
        self._begun += raw
        try:
            text = self._begun.decode()
        except UnicodeDecodeError as error:
            if error.end == len(self._begun) and "unexpected end" in error.reason:
                return ""  # more of it comes
            text = self._begun.decode(errors="replace")
        self._begun = b""
        return text
