"""Datasets: what traces say of costs, read and refused by row. From profiles come states, from logs records."""
