"""A child that takes jobs and answers none."""

from kvpolicy_vllm.bench.engine_process import jobs

if __name__ == "__main__":
    for _ in jobs():
        pass
