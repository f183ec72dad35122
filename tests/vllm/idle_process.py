"""A child that answers every job at once and then waits."""

from kvpolicy_vllm.bench.engine_process import jobs

if __name__ == "__main__":
    for _, answer in jobs():
        answer("result", {})
