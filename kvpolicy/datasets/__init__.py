"""Datasets: costs read from traces and checked row by row. Profiles yield states, production logs yield records."""
