"""Step and copy times of a simulated machine: by a cost model's laws, or by measured tables of operators.

``kvpolicy import-profile`` makes a hardware model from tables in a known layout.
"""
