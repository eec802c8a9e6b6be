"""Small element-wise functions that a compiler turns into one pass over memory each.

On CUDA the whole model is compiled and they are part of it. On a CPU compiling the model takes longer than many runs;
compiling these few functions alone takes seconds and gives the same speed.
"""

import os
import subprocess
from shutil import which

import torch


class Fused:
    """A function that runs as written until compile_fused(), then in its compiled form."""

    every: list = []
    compiled = False

    def __init__(self, function):
        self.run = self.function = function
        self.__doc__ = function.__doc__
        Fused.every.append(self)

    def __call__(self, *args):
        return self.run(*args)


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


def compile_fused() -> str | None:
    """Compile every Fused function from now on (at its first call).

    Returns None, or why the compiler cannot build what torch gives it (no Python.h, say); then all stay as written.
    """
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = (None, cpp_compiler())
    _skip_trial_builds()
    try:
        torch.compile(lambda x: x.square() + 1, dynamic=False)(torch.ones(64))
    except Exception as error:  # inductor raises many kinds
        return next((line for line in str(error).splitlines() if "error:" in line), type(error).__name__).strip()
    for fused in Fused.every:
        fused.run = torch.compile(fused.function, dynamic=False)
    Fused.compiled = True
    return None
