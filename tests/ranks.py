"""Test functions on several gloo ranks."""

import torch.multiprocessing as mp

from nanochat.common import leave


def spawn(function, args=(), nprocs=2):
    """function(rank, *args) in `nprocs` processes; an exception of one is raised here."""
    mp.spawn(_call, (function, args), nprocs=nprocs)


def _call(rank, function, args):
    function(rank, *args)
    leave()  # gloo's threads outlive the group; what they let go of during shutdown aborts (pytorch PR 179291)
