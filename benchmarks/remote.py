"""Step time with an upload relative to the same step without one, and the upload rate, with a local S3 server.

    python benchmarks/remote.py

The server (moto) runs in another process on the same machine and uses the same cores. A server on another machine does not, so
the ratios are upper bounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine
from workloads import MnistCNN

import instrument
from instrument.storage.remote_folder import RemoteFolder, filesystem
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_upload import Upload

ROUNDS, STEPS, BATCH = 8, 40, 16
SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
STATISTICS = {"layers": "layers.*", "kind": "forward", "action": "record"}
SPECS: dict[str, dict[str, Any]] = {
    "1 tensor of each layer": {**STATISTICS, "tensors": True, "samples": 1},
    "8 tensors of each layer": {**STATISTICS, "tensors": True, "samples": 8},
}


def train(folder: Path, spec: dict[str, Any], remote: RemoteFolder | None) -> tuple[float, float, float]:
    """Train for some steps, with an upload if `remote` is given.

    Returns:
        The median step in seconds, the bytes sent until the last step, and the seconds from then to the end of the upload.
    """
    torch.manual_seed(0)
    model, images, targets = MnistCNN(), torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times, upload = [], None
    with instrument.attach(model, {"out": spec}, optimizer=optimizer, out=folder) as probe:
        if remote is not None:
            upload = Upload(folder, remote, rank=0)
            upload.begin()
        for _ in range(STEPS):
            start = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            times.append(time.perf_counter() - start)
        sent = 0 if upload is None else upload.sent.bytes
    start = time.perf_counter()
    if upload is not None:
        assert not upload.end().failed
    return statistics.median(times), sent, time.perf_counter() - start


def measure(name: str, spec: dict[str, Any], bucket: str) -> str:
    """Return one row of the table."""
    ratios, total_bytes, sent_during_run = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(ROUNDS):
            results = {}
            for remote in (number % 2, 1 - number % 2):
                folder = Path(scratch) / f"{name}-{number}-{remote}".replace(" ", "_")
                target = RemoteFolder(f"{bucket}/{folder.name}", "") if remote else None
                results[remote] = train(folder, spec, target)
                if target is not None:
                    total_bytes.append(sum(target.sizes().values()))
            ratios.append(results[1][0] / results[0][0])
            sent_during_run.append(results[1][1] / total_bytes[-1])
        low, median, high = statistics.quantiles(ratios, n=4)
        start, processor_start = time.perf_counter(), time.process_time()
        sent = send_all(folder, RemoteFolder(f"{bucket}/again/{folder.name}", ""))
        rate, processor = sent.bytes / (time.perf_counter() - start), time.process_time() - processor_start
    megabytes = statistics.median(total_bytes) / 1e6
    return (
        f"| {name} | {megabytes:.1f} | {megabytes / STEPS:.2f} | {100 * statistics.median(sent_during_run):.0f}% "
        f"| {median:.3f} ({low:.2f}-{high:.2f}) | {rate / 1e6:.0f} | {1e9 * processor / sent.bytes:.1f} |"
    )


def main() -> None:
    print(machine())
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = f"http://{server.stdout.readline().strip()}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1"}
    filesystem("s3://bucket", "")[0].mkdir("bucket")
    print(
        "\n| recorded | MB per run | MB per step | sent during the run | step time, with / without "
        "| MB/s, upload alone | core ms per MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, spec in SPECS.items():
        print(measure(name, spec, "s3://bucket"), flush=True)
    server.kill()


if __name__ == "__main__":
    main()
