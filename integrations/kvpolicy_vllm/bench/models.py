"""Makes the small model that measurements and tests use where none is given: from a seed, nothing is downloaded."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

VOCABULARY = 2048
CONTEXT_TOKENS = 16384
BOS, EOS = "<s>", "</s>"
SPECIAL = (BOS, EOS)

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def make_llama(
    folder: Path | str,
    seed: int = 0,
    context_tokens: int = CONTEXT_TOKENS,
    hidden: int = 256,
    intermediate: int = 512,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    spread: float = 0.15,
) -> Path:
    """Write a Llama and its tokenizer to ``folder``; the same arguments give the same bytes. Return the folder.

    With the default shape it has 3.4 million parameters, and its KV cache takes 4096 bytes per token in float32.
    Weights are normal with standard deviation ``spread``, wide enough that greedy text does not repeat itself at once.
    """
    folder = Path(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context_tokens,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=SPECIAL.index(EOS),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    # A generation config without sampling parameters, which vLLM would take as defaults.
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)
    _save_silently(model, folder)
    make_tokenizer(context_tokens).save_pretrained(folder)
    return folder


def _save_silently(model: LlamaForCausalLM, folder: Path) -> None:
    """Save without transformers' progress bar, which would disturb the caller's."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def make_tokenizer(context_tokens: int = CONTEXT_TOKENS) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with exactly the model's vocabulary, for any text."""
    tokens, merges = _pieces()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pretrained = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    pretrained.chat_template = CHAT_TEMPLATE
    return pretrained


def _pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in the order of their ids, and the merges that produce those of more than one byte.

    The special tokens and the 256 bytes are followed by pairs of letters, a space with a letter, and a space with a
    pair, as many as the vocabulary holds. Nothing is learned from text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space, letters = "Ġ", string.ascii_lowercase  # byte-level tokenizers write a space as Ġ
    pairs = [(a, b) for a in letters for b in letters]
    merges = [*pairs, *((space, a) for a in letters), *((space, a + b) for a, b in pairs)]
    merges += [(a, b) for a in string.ascii_uppercase for b in letters]
    merges = merges[: VOCABULARY - len(SPECIAL) - len(alphabet)]
    return [*SPECIAL, *alphabet, *(a + b for a, b in merges)], merges
