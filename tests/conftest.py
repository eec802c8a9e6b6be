"""Tests compute in fp32 on one thread, whatever the machine could do."""

import os

os.environ["NANOCHAT_DTYPE"] = "float32"
os.environ.setdefault("OMP_NUM_THREADS", "1")
