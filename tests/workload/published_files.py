"""Small files in the published formats, written by the tests themselves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225350,879,55
"""

AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 23:59:59.999+00:00,2162,5
2024-05-13 00:00:00+00:00,2399,6
2024-05-13 00:00:00.009930+00:00,76,15
"""

BURSTGPT_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
118,GPT-4,417,276,693,API log
"""

BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.5,,2,ChatGPT,36,29,65,API log
"""

ARRIVALS = """arrival_s,prompt_tokens,output_tokens
0.0,4808,10
0.052,3180,8
0.052,110,27
"""

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3052, "input_length": 1024, "output_length": 794, "hash_ids": [0, 1]},
    {"timestamp": 3052, "input_length": 513, "output_length": 3, "hash_ids": [0, 9]},
]


def agent_call(session: str, at_s: float, asked: int, answered: int, think_s: float | None, **more: Any) -> Any:
    """A line of a coding agent's session, with as many ids as full blocks fit."""
    ids = list(range(1, 1 + asked // 64))
    return {"session": session, "t": at_s, "in": asked, "out": answered, "think_time": think_s, "hash_ids": ids} | more


AGENTIC = [
    agent_call("a", 0.0, 130, 7, 0.0, api_time=5.0),
    agent_call("a", 9.0, 200, 8, 4.0, api_time=1.0),
    agent_call("a", 30.0, 320, 9, 20.0, api_time=2.0),
    agent_call("b", 0.0, 64, 1, 0.0, api_time=2.0),
    agent_call("b", 3.0, 100, 2, 1.0, api_time=2.0),
]

SHAREGPT = [
    {
        "id": "first",
        "conversations": [
            {"from": "human", "value": "one two three"},
            {"from": "gpt", "value": "four five six"},
            {"from": "human", "value": 'seven "eight" {nine}] \\ '},
            {"from": "gpt", "value": "ten\neleven twelve"},
            {"from": "human", "value": "never answered"},
        ],
    },
    {"id": "silent", "conversations": [{"from": "human", "value": "hello"}]},
    {"id": "second", "conversations": [{"from": "user", "value": "a b c"}, {"from": "assistant", "value": "d e f"}]},
]


SERVEGEN = """client,window_start_s,rate_per_s,cv,pattern,arg1,arg2
0,0,0.005,1.0,Gamma,1.0,200.0
0,600,0.006666666666666667,2.0,Gamma,0.25,600.0
1,600,0.0033333333333333335,1.5,Weibull,0.7,240.0
"""


def servegen(windows: Path) -> Path:
    """The lengths that belong to a file of ServeGen's windows: in the folder of its own name, made once."""
    file = windows.parent / f"{windows.name}-lengths" / "lengths.parquet"
    if not file.exists():
        file.parent.mkdir()
        rows = [(client, 0, field, value, 0.5) for client in (0, 1) for field in ("input_tokens", "output_tokens")
                for value in (5.0, 80.0)]  # fmt: skip
        names = ("client", "window_start_s", "field", "value", "prob")
        columns = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
        pyarrow.parquet.write_table(pa.table(columns), file)
    return file


def put(folder: Path, name: str, content: str | bytes | Sequence[Any]) -> Path:
    """A file of text, of bytes, or of JSON lines; gzip where its name ends so."""
    if not isinstance(content, str | bytes):
        content = "".join(json.dumps(row) + "\n" for row in content)
    raw = content.encode() if isinstance(content, str) else content
    path = folder / name
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path
