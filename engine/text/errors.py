"""Errors of the text layer. All are the caller's fault and are refused at the border."""

from __future__ import annotations


class TextError(ValueError):
    """A text asset or a request's text cannot be used; the message says what to change."""


class UnsupportedTokenizer(TextError):
    """The folder's tokenizer is not one this engine can stream (byte-level BPE)."""


class TemplateError(TextError):
    """The chat template refused the messages or is missing."""
