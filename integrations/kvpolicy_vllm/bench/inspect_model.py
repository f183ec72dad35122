"""Finds what a profile must know before its first engine starts: ``python -m kvpolicy_vllm.bench.inspect_model``.

Takes one job, ``{"llm": FOLDER or null, "make": FOLDER, "seed": ...}``, makes the small model in ``make`` if ``llm`` is
null (``"shape"``: further arguments of :func:`make_llama`), and answers ``{"llm": FOLDER, "device": whether there is an
accelerator}``. A process of its own, since importing vLLM takes seconds and binds the process to cores.
"""

from __future__ import annotations

from vllm.platforms import current_platform

from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.models import make_llama


def main() -> None:
    for job, answer in jobs():
        llm = job["llm"] or str(make_llama(job["make"], job["seed"], **job.get("shape", {})))
        answer("result", {"llm": llm, "device": not current_platform.is_cpu()})


if __name__ == "__main__":
    main()
