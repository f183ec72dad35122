"""What a profile has to know before its first engine starts: ``python -m kvpolicy_vllm.bench.inspect_model``.

Takes one job, ``{"llm": FOLDER or null, "make": FOLDER, "seed": ...}``, makes the small model in ``make`` where no
other is given (``"shape"``: further arguments of :func:`make_llama`), and answers ``{"llm": FOLDER, "device": whether
there is an accelerator}``. In a process of its own, since importing vLLM binds this one to cores and takes seconds.
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
