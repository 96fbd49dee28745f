"""The language model task: predict the next token of any text."""
