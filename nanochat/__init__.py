"""nanochat with a Bank of Values."""

import time

STARTED = time.perf_counter()  # before the first heavy import; start-up times count from here
