"""Tests compute in fp32 on one thread, whatever the machine could do."""

import os

os.environ["NANOCHAT_DTYPE"] = "float32"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A folder of CORE's items of our own, one task of each kind."""
    from core_items import SIZES, write_bundle

    return write_bundle(tmp_path_factory.mktemp("bundle") / "eval_bundle", SIZES)
