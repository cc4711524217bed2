"""The work in shoal, with the fleet that shoal chooses by default."""

import sys
import time
from pathlib import Path

import work

import shoal


def main(folder: Path, rounds: int, name: str) -> None:
    ends: list[float] = []
    keys = work.job_keys(work.load_work(folder)) | {"rounds": rounds, "eval_every": rounds}
    result = shoal.run("fedavg", work.load_federation(folder), on_round=lambda record: ends.append(time.time()), **keys)
    work.write_result(folder, name, ends, result.state.models["global"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
