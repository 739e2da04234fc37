"""Finds the first stop string in a stream of text and never releases a character of it.

"First" is the match that completes first, and of several that complete at the same character the
longest. That is the only rule that does not depend on how the text is cut into pieces: a server cannot
know whether a longer match will follow. Each stop string keeps the length of its longest prefix that
the text ends with (Knuth, Morris, Pratt 1977), so a character costs the same however long they are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Matches the stop strings of one choice. Empty stop strings are ignored."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops) if stop]
        self._first_characters = frozenset(pattern.text[0] for pattern in self._patterns)
        self._held = ""
        self.matched: str | None = None
        """The stop string found; no text is released after it."""

    @property
    def num_held(self) -> int:
        """Characters kept back because they may begin a stop string."""
        return len(self._held)

    def append(self, text: str) -> str:
        """Return the text that can no longer belong to a stop string, of all appended so far."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text  # nothing begins here: the way of most text, or there are no stop strings
        known = self._held + text
        for place, character in enumerate(text, len(self._held)):
            longest = self._advance(character)
            if longest is not None:
                self.matched = longest
                self._held = ""
                return known[: place + 1 - len(longest)]
        num_held = max(pattern.length for pattern in self._patterns)
        released = len(known) - num_held
        self._held = known[released:]
        return known[:released]

    def flush(self) -> str:
        """Return the text held back: nothing follows, so it is no stop string."""
        text, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.length = 0
        return text

    def _advance(self, character: str) -> str | None:
        longest: str | None = None
        for pattern in self._patterns:
            if pattern.advance(character) and (longest is None or len(pattern.text) > len(longest)):
                longest = pattern.text
        return longest


class _Pattern:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_fallback", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._fallback = [0] * len(text)
        """For each prefix, by last index: the length of its longest proper prefix that is its suffix."""
        length = 0
        for place in range(1, len(text)):
            while length and text[place] != text[length]:
                length = self._fallback[length - 1]
            length += text[place] == text[length]
            self._fallback[place] = length

    def advance(self, character: str) -> bool:
        """Take one more character; return whether the text now ends with the whole string."""
        length = self.length
        while length and self.text[length] != character:
            length = self._fallback[length - 1]
        length += self.text[length] == character
        self.length = length
        return length == len(self.text)
