"""A child that forks another process, says which, and answers nothing further."""

import os
import time

from kvpolicy_vllm.bench.engine_process import jobs

if __name__ == "__main__":
    for _, answer in jobs():
        forked = os.fork()
        if forked:
            print(forked, flush=True)
            answer("news", {"forked": forked})
        time.sleep(600)
