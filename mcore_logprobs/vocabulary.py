"""The true size of a vocabulary that Megatron-LM pads."""

from __future__ import annotations

import sys


def true_vocab_size(args: object) -> int | None:
    """The number of tokens before padding, from Megatron-LM's parsed arguments.

    The tokenizer that `megatron.training` has built says it; before one is built, a NullTokenizer
    is asked for its own (some releases add a token for the end of a document to `--vocab-size`),
    and else `--vocab-size` stands.

    Returns: None where nothing is padded, or where the namespace is not Megatron-LM's.

    Raises:
        ValueError: a padded size of which the true one is not known.
    """
    if not hasattr(args, "padded_vocab_size"):
        return None
    padded = args.padded_vocab_size
    size = tokenizer_size() or _size_by_flags(args)
    if size is None and padded is not None:
        raise ValueError(
            f"padded_vocab_size is {padded}, and neither a tokenizer nor --vocab-size says how "
            "many tokens of them are real: expected --logprob-vocab-size (the padded size itself "
            "counts every column)"
        )
    return None if size is None or size == padded else size


def tokenizer_size() -> int | None:
    """The size of the tokenizer that Megatron-LM holds for this process, if it has built one."""
    holder = sys.modules.get("megatron.training.global_vars")
    tokenizer = getattr(holder, "_GLOBAL_TOKENIZER", None)
    size = getattr(tokenizer, "vocab_size", None)
    return None if size is None else int(size)


def _size_by_flags(args: object) -> int | None:
    size = getattr(args, "vocab_size", None)
    if size is None or getattr(args, "tokenizer_type", None) != "NullTokenizer":
        return size
    try:
        from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    except ImportError:  # releases before megatron.core.tokenizers
        return int(size) + 1
    return int(NullTokenizer(size).vocab_size)
