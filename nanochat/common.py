"""What every other room needs: dtype, ranks, devices, the base directory, safe file writing, printing."""

import hashlib
import json
import logging
import math
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

# ---------------------------------------------------------------------------- compute dtype

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def detect_compute_dtype():
    """(dtype, reason) of matmuls and activations: NANOCHAT_DTYPE, else bf16 where the hardware has it."""
    name = os.environ.get("NANOCHAT_DTYPE")
    if name:
        if name not in DTYPES:
            raise ValueError(f"NANOCHAT_DTYPE={name!r}: use one of {', '.join(DTYPES)}")
        return DTYPES[name], f"NANOCHAT_DTYPE={name}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major >= 8:
            return torch.bfloat16, f"CUDA sm_{major}{minor} multiplies bf16"
        return torch.float32, f"CUDA sm_{major}{minor} has no bf16"
    if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16, "CPU with AMX or AVX512-bf16"
    return torch.float32, "CPU without bf16 instructions"


COMPUTE_DTYPE, COMPUTE_DTYPE_REASON = detect_compute_dtype()

# ---------------------------------------------------------------------------- ranks and devices


def is_ddp_requested() -> bool:
    """True under torchrun, also before the process group exists."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def is_ddp_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_dist_info():
    """(under torchrun?, rank, local rank, world size)."""
    if not is_ddp_requested():
        return False, 0, 0, 1
    return True, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def autodetect_device_type() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def compute_init(device_type="cuda", seed=42):
    """Seeds, matmul precision, and under torchrun a process group: NCCL on CUDA, gloo elsewhere.

    Returns (under torchrun?, rank, local rank, world size, torch.device).
    Raises ValueError when the device type is unknown or not present.
    """
    if device_type not in ("cuda", "mps", "cpu"):
        raise ValueError(f"--device-type {device_type!r}: use cuda, mps or cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device-type cuda: this PyTorch sees no CUDA device; use --device-type cpu")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device-type mps: this PyTorch sees no MPS device; use --device-type cpu")
    torch.manual_seed(seed)
    if device_type == "cuda":
        torch.set_float32_matmul_precision("high")
    ddp, rank, local_rank, world_size = get_dist_info()
    device = torch.device("cuda", local_rank) if ddp and device_type == "cuda" else torch.device(device_type)
    if ddp and not is_ddp_initialized():
        if device_type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group(backend="nccl", device_id=device)
        elif device_type == "cpu":
            dist.init_process_group(backend="gloo")
        else:
            raise ValueError("several ranks need cuda (NCCL) or cpu (gloo), not mps")
        dist.barrier()
    return ddp, rank, local_rank, world_size, device


def compute_cleanup():
    if is_ddp_initialized():
        dist.destroy_process_group()


def leave(code: int = 0):
    """End the process without the interpreter's own shutdown, in which gloo's threads may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_script(name: str, main):
    """main() of a script: a ValueError or OSError is one line and status 1, Ctrl-C a line, a closed pipe nothing."""
    try:
        main()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\n{name}: stopped")


# Dense bf16 FLOP/s and memory bytes/s by data sheet; the first row all of whose words occur in the name wins.
PEAKS = (
    (("gb200",), 2.5e15, 8.0e12), (("b200",), 2.25e15, 8.0e12), (("b100",), 1.8e15, 8.0e12),
    (("h200", "nvl"), 836e12, 4.8e12), (("h200",), 989e12, 4.8e12),
    (("h100", "nvl"), 835e12, 3.9e12), (("h100", "pcie"), 756e12, 2.0e12), (("h100",), 989e12, 3.35e12),
    (("h800",), 989e12, 3.35e12), (("a100",), 312e12, 2.0e12), (("a800",), 312e12, 2.0e12),
    (("a40",), 149.7e12, 696e9), (("a30",), 165e12, 933e9), (("l40s",), 362e12, 864e9), (("l4",), 121e12, 300e9),
    (("5090",), 209.5e12, 1.79e12), (("4090",), 165.2e12, 1.01e12), (("3090",), 71e12, 936e9),
    (("mi355",), 2.5e15, 8.0e12), (("mi325",), 1.3074e15, 6.0e12), (("mi300x",), 1.3074e15, 5.3e12),
)  # fmt: skip


def _peak(device_name: str, column: int) -> float:
    name = device_name.lower()
    return next((row[column] for row in PEAKS if all(word in name for word in row[0])), math.inf)


def get_peak_flops(device_name: str) -> float:
    """Dense bf16 FLOP/s of a device by name; inf when unknown, so that MFU reads 0."""
    return _peak(device_name, 1)


def get_peak_bandwidth(device_name: str) -> float:
    """Memory bytes/s of a device by name; inf when unknown."""
    return _peak(device_name, 2)


# ---------------------------------------------------------------------------- files


def get_base_dir() -> str:
    """The folder of everything that is made and not committed: NANOCHAT_BASE_DIR, default ~/.cache/nanochat."""
    path = os.environ.get("NANOCHAT_BASE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "nanochat")
    os.makedirs(path, exist_ok=True)
    return path


@contextmanager
def atomic_write(path, mode="wb"):
    """A file handle whose content appears under `path` whole (temporary name, fsync, rename) or not at all.

    Raises OSError naming `path` where the disk or the permissions do not allow it.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise _about(error, path) from error
    try:
        with os.fdopen(fd, mode, encoding=None if "b" in mode else "utf-8") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _about(error, path) from error
        raise


def _about(error: OSError, path) -> OSError:
    """The same kind of error about the file that the user knows, not about its temporary name."""
    return type(error)(error.errno, f"not written: {error.strerror or error}", str(path))


def _sync_folder(folder):
    """A rename outlives a power cut once its folder is on the disk; file systems that cannot do this are let be."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def first_line(error) -> str:
    """An exception in one line of at most 200 characters: its first line, or its kind when it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def jsonable(value):
    """`value` with every NaN or infinity turned to None: JSON knows neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def write_json(path, value):
    with atomic_write(path, "w") as f:
        json.dump(jsonable(value), f, indent=2, allow_nan=False)
        f.write("\n")


def seal(facts: dict) -> dict:
    """`facts` and, under `seal`, a sha256 over them; the same before they are written as JSON and after."""
    own = jsonable({key: value for key, value in facts.items() if key != "seal"})
    return {**facts, "seal": hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()}


def seal_holds(facts: dict) -> bool:
    """False when `facts` were sealed and have changed since."""
    return "seal" not in facts or facts["seal"] == seal(facts)["seal"]


def file_sha256(path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download_file_with_lock(url, filename, postprocess_fn=None):
    """`url` into base_dir/`filename` once, whichever rank comes first; returns the path.

    `postprocess_fn(path of the whole file)` runs before the file takes its name, so a kill in between does it again.
    Raises ValueError naming file and address when the server does not deliver (see nanochat.download).
    """
    from filelock import FileLock

    from nanochat.download import download

    path = os.path.join(get_base_dir(), filename)
    if os.path.exists(path):
        return path
    with FileLock(path + ".lock"):
        if os.path.exists(path):
            return path
        print(f"downloading {url}")
        arrived = download(url, f"{path}.new", command="the same command again")
        if postprocess_fn is not None:
            postprocess_fn(arrived)
        os.replace(arrived, path)
    return path


# ---------------------------------------------------------------------------- what people see


def print0(s="", **kwargs):
    """print on rank 0 only. Where nobody reads any more, a terminal or pipe that was closed, it is for nobody."""
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            print(s, **kwargs)
        except OSError:
            _to_nobody(kwargs.get("file") or sys.stdout)


def _to_nobody(stream):
    """What `stream` still holds and all that comes goes to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_banner():
    print0("nanochat with a Bank of Values")


def setup_default_logging():
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


def progress(iterable=None, **kwargs):
    """tqdm on a terminal of rank 0, silent elsewhere; callers print plain lines when it is silent."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() and int(os.environ.get("RANK", 0)) == 0
    return tqdm(iterable, disable=not shown, dynamic_ncols=True, **kwargs)


class DummyWandb:
    """wandb's interface without wandb."""

    def log(self, *args, **kwargs):
        pass

    def finish(self):
        pass
