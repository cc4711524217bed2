"""The work as a hand-written PyTorch loop: one process, all cores."""

import sys
import time
from pathlib import Path

import torch
import work


def main(folder: Path, rounds: int, name: str) -> None:
    x, y = work.load_samples(folder)
    order, net = work.load_orders(folder), work.make_network(work.load_work(folder))
    weights, ends = work.load_first_weights(folder), []
    for r in range(rounds):
        trained = []
        for c in range(len(x)):
            net.load_state_dict(weights)
            work.train_client(net, x[c], y[c], order[r, c])
            trained.append({k: v.clone() for k, v in net.state_dict().items()})
        weights = {k: torch.stack([t[k] for t in trained]).mean(0) for k in weights}
        ends.append(time.time())
    work.write_result(folder, name, ends, weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
