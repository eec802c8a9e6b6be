"""Small functions that a compiler turns into one pass over memory each.

On CUDA the whole model is compiled and they are part of it. On a CPU compiling the model takes longer than many runs;
compiling these few functions alone takes seconds and gives the same speed.
"""

import os
import subprocess
from shutil import which

import torch


class Fused:
    """A function that runs as written until compile_fused(), then in its compiled form.

    dynamic=False: for training, compiled once per shape; dynamic=True: for decoding, once for all lengths.
    """

    every: list = []

    def __init__(self, function, dynamic=False):
        self.run = self.function = function
        self.dynamic, self.compiled = dynamic, False
        self.__doc__ = function.__doc__
        Fused.every.append(self)

    def __call__(self, *args):
        return self.run(*args)

    def reset(self):
        """Run as written again."""
        self.run, self.compiled = self.function, False


def cpp_compiler() -> str | None:
    """The C++ compiler that torch would call, None without one."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (path := which(name))), None
    )


# What torch may pass for the instruction sets of x86; a compiler that knows them needs no trial build of each.
X86_FLAGS = ("-mavx2", "-mavx512f", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")


def _skip_trial_builds():
    """Spare torch 7 s of test compilations per empty cache: it asks the CPU itself which instructions there are."""
    known = subprocess.run([cpp_compiler(), *X86_FLAGS, "-E", "-x", "c++", os.devnull], capture_output=True)
    if known.returncode == 0 and torch._inductor.config.cpp.vec_isa_ok is None:
        torch._inductor.config.cpp.vec_isa_ok = True


def compile_fused(dynamic=False) -> str | None:
    """Compile the Fused functions of training (dynamic=False) or decoding (True) from now on, at their first call.

    Returns None, or why the compiler cannot build what torch gives it (no Python.h, say); then all stay as written.
    """
    import torch._inductor.config

    if cpp_compiler() is None:
        return "no C++ compiler found"
    torch._inductor.config.cpp.cxx = (None, cpp_compiler())
    _skip_trial_builds()
    try:
        torch.compile(lambda x: x.square() + 1, dynamic=False)(torch.ones(64))
    except Exception as error:  # inductor raises many kinds
        return next((line for line in str(error).splitlines() if "error:" in line), type(error).__name__).strip()
    if dynamic:  # batch, groups and layouts each want a variant; past the limit torch would silently run as written
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for fused in Fused.every:
        if fused.dynamic == dynamic:
            fused.run, fused.compiled = torch.compile(fused.function, dynamic=dynamic), True
    return None
