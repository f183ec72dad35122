"""A child that says how many cores an engine keeps free by its environment, and ends without an answer."""

import os
import sys

if __name__ == "__main__":
    sys.exit(os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "as many as it will"))
