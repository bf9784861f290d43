"""Train a small byte-level mixture-of-experts GPT, its experts spread over the devices.

    python examples/train_moe.py --steps 100                  on 8 virtual CPU devices, or on GPUs
    python examples/train_moe.py --mesh data=2,expert=4 --expert-mode capacity --capacity-factor 1
    python -m jcoll launch -n 4 --devices-per-process 2 examples/train_moe.py --steps 100

This is train_gpt.py with 16 experts a layer, if nothing else is asked for, and takes all its flags.
"""

import sys

import train_gpt

PROGRAM = {
    "prog": "train_moe.py",
    "description": "Train a small byte-level mixture-of-experts GPT on Python's standard library.",
    "epilog": (__doc__ or "").partition("\n\n")[2],
    "experts": 16,
    "layers": 2,
}


def main(argv=None) -> int:
    """train_gpt.main with other defaults."""
    return train_gpt.main(argv, **PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
