"""kvpolicy: recompute or swap, decided by measured cost, for LLM servers that run out of KV memory."""

__version__ = "0.1.0"
