"""Copies of KV blocks between the device and the host pool: the worker side, and the only part that needs torch."""
