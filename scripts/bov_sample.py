"""Continue a text with a trained model, on the terminal while it is written.

python -m scripts.bov_sample --model-tag d6_bov --prompt "My fellow citizens," --max-tokens 64
python -m scripts.bov_sample --export out/d6_bov --bov-placement mmap
"""

import argparse
import codecs
import sys

from nanochat.bov.decode import STRATEGIES
from nanochat.bov.placement import PLACEMENTS, place
from nanochat.checkpoint_manager import load_model
from nanochat.common import autodetect_device_type, compute_cleanup, compute_init, run_script
from nanochat.engine import Engine
from nanochat.export import load_exported


def stream_text(engine, tokenizer, prompt, **options):
    """Yield the continuation of `prompt` as text, piece by piece, each a whole number of characters.

    Bytes that are not UTF-8 become U+FFFD; the token that ends a text is left out.
    """
    tokens = tokenizer.encode(prompt, prepend=tokenizer.get_bos_token_id())
    terminal = (tokenizer.get_bos_token_id(), tokenizer.encode_special("<|assistant_end|>"))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for (token,), _ in engine.generate(tokens, **options):
        if token not in terminal:
            yield decoder.decode(tokenizer.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def load(args, device):
    """(model, tokenizer) of a checkpoint or an exported folder, its tables where --bov-placement wants them."""
    if args.export is not None:
        if args.model_tag is not None or args.step is not None:
            raise ValueError("--export names a folder of its own: leave out --model-tag and --step")
        return load_exported(args.export, device, placement=args.bov_placement)[:2]
    if args.bov_placement == "mmap":
        raise ValueError("--bov-placement mmap reads an exported file: run scripts.bov_export and give --export DIR")
    model, tokenizer, _ = load_model("base", device, phase="eval", model_tag=args.model_tag, step=args.step)
    if args.bov_placement != "device":
        place(model, args.bov_placement)
    return model, tokenizer


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.bov_sample", description="Sample from a checkpoint")
    parser.add_argument("--model-tag", default=None, help="folder under base_checkpoints (default: the largest model)")
    parser.add_argument("--step", type=int, default=None, help="step to load (default: the newest)")
    parser.add_argument(
        "--export", default=None, metavar="DIR", help="a folder written by bov_export, instead of a tag"
    )
    parser.add_argument("--bov-placement", default="device", choices=PLACEMENTS, help="where value tables lie")
    parser.add_argument("--decode-strategy", default="auto", choices=STRATEGIES, help="nanochat/bov/decode.py")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to write at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the most likely token")
    parser.add_argument("--top-k", type=int, default=50, help="sample among the K most likely tokens, 0 = all")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop the text
    device = compute_init(args.device_type or autodetect_device_type())[-1]
    model, tokenizer = load(args, device)
    options = dict(max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    print(args.prompt, end="", flush=True)
    for piece in stream_text(
        Engine(model, tokenizer, strategy=args.decode_strategy), tokenizer, args.prompt, **options
    ):
        print(piece, end="", flush=True)
    print()
    compute_cleanup()


if __name__ == "__main__":
    run_script("bov_sample", main)
