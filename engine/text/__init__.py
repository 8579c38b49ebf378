"""Text in and out of tokens: tokenizer, chat template, detokenizer, stop strings. Never imports torch."""
