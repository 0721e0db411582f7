"""Text in and out of a model: tokens, and the templates that make prompts of conversations."""

from .tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer"]
