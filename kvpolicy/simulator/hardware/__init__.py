"""How long a simulated machine takes: by a cost model's laws, or by measured tables of operators.

``kvpolicy import-profile`` makes a hardware model of such tables, once their layout is known.
"""
