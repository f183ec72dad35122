"""Measurements on a GPU, in pieces of a few minutes that can be interrupted and resumed.

On a CPU the same runs at a small scale, to try the programs out. See `docs/gpu.md`.
"""
