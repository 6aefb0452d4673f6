#!/usr/bin/env python
"""How many multiprocessors elementwise passes should take beside the products, by trying.

Products are bound by the tensor cores (and at full load by the card's power), passes by memory.
Side by side they could take the time of the longer; what they take is measured here, on one rank's
step as muon_step.py has it, beside one after the other.

    python scripts/bench/overlap_search.py --programs 0 8 12 16 24
"""

import argparse
import json
import statistics
from unittest import mock

import torch
from device import release
from muon_step import Step, print_now
from rank_model import build_model, fill_gradients_, open_ranks, read_model
from step_variants import HEADLINE, VARIANTS

from trainer.optim import Muon, background
from trainer.optim.background import Background
from trainer.optim.kernels import symmetric
from trainer.optim.kernels.symmetric import Tiles


def main() -> None:
    """Run the search."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--programs", type=int, nargs="+", default=[0, 8, 12, 16], help="0: serial")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    found = []
    with open_ranks(arguments.device, 8, 3):
        config = read_model("qwen3_30b_a3b", arguments.layers, is_tiny=arguments.tiny)
        model, mesh = build_model(config, 8, arguments.device)
        fill_gradients_(model, seed=1)
        for num_programs in arguments.programs:
            for is_dynamic in (True, False):
                tiles = Tiles(is_dynamic=is_dynamic)
                symmetric.quack_products.cache_clear()
                with (
                    mock.patch.object(symmetric, "Tiles", lambda tiles=tiles: tiles),
                    mock.patch.object(background, "NUM_MULTIPROCESSORS", num_programs),
                ):
                    optimizer = VARIANTS[HEADLINE](model, mesh)
                    assert isinstance(optimizer, Muon)
                    if not num_programs:
                        optimizer._stacked._background = Background(torch.device("cpu"))
                    step = Step(optimizer, device)
                    times = [step() for _ in range(arguments.steps)][2:]
                    phases = optimizer.phase_times()()
                    row = {"programs": num_programs, "is_dynamic": is_dynamic}
                    found.append({**row, "median_s": statistics.median(times), **phases})
                    print_now(f"{found[-1]}")
                del optimizer, step
                release(device)
    print(json.dumps({"benchmark": "overlap_search", "rows": found}))


if __name__ == "__main__":
    main()
