"""Recorded tensors on disk: what is written and read a second, beside other formats and a raw write.

    python benchmarks/storage.py [--megabytes 512] [--repeats 3]

The tensors are those of a step of the MNIST CNN: some large, many small. Written through the page cache, without a sync;
read back as arrays of the right shapes. A format whose package is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from measure import machine
from torch import Tensor

import instrument
from instrument.sinks.parquet import ParquetSink

SHAPES = [(64, 32, 26, 26), (64, 64, 24, 24), (64, 64, 12, 12), *[(64, 128)] * 40]
KEY = (0, 0, "train", 0, "kept", "layer", "Conv2d", "forward", "output", "", 0, 0, False, "global")

Write = Callable[[Path, Sequence[Sequence[Tensor]]], None]
Read = Callable[[Path], int]


def raw(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensors in steps:
            for tensor in tensors:
                file.write(memoryview(tensor.numpy()).cast("B"))


def raw_back(folder: Path) -> int:
    return int(np.fromfile(folder / "raw", np.float32).nbytes)


def ours(mode: str) -> Write:
    def write(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
        sink = ParquetSink(folder, tensors=mode)  # type: ignore[arg-type]
        for step, tensors in enumerate(steps):
            for tensor in tensors:
                sink.keep((step, *KEY), tensor.shape, tensor)
            sink.end_step()
        sink.close()
        (folder / "run.json").write_text(json.dumps({"status": "done"}))

    return write


def ours_back(folder: Path) -> int:
    return sum(values.nbytes for values in instrument.load(folder).tensors()["values"])


def numpy_files(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    for step, tensors in enumerate(steps):
        for i, tensor in enumerate(tensors):
            np.save(folder / f"{step}-{i}.npy", tensor.numpy())


def numpy_back(folder: Path) -> int:
    return sum(np.load(file).nbytes for file in folder.glob("*.npy"))


def torch_files(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    for step, tensors in enumerate(steps):
        for i, tensor in enumerate(tensors):
            torch.save(tensor, folder / f"{step}-{i}.pt")


def torch_back(folder: Path) -> int:
    return sum(torch.load(file, weights_only=True).nbytes for file in folder.glob("*.pt"))


def safetensors_files(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    from safetensors.torch import save_file

    for step, tensors in enumerate(steps):
        save_file({str(i): tensor for i, tensor in enumerate(tensors)}, folder / f"{step}.safetensors")


def safetensors_back(folder: Path) -> int:
    from safetensors.torch import load_file

    return sum(t.clone().nbytes for file in folder.glob("*.safetensors") for t in load_file(file).values())


def hdf5(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    import h5py

    with h5py.File(folder / "all.h5", "w") as file:
        for step, tensors in enumerate(steps):
            for i, tensor in enumerate(tensors):
                file.create_dataset(f"{step}/{i}", data=tensor.numpy())


def hdf5_back(folder: Path) -> int:
    import h5py

    with h5py.File(folder / "all.h5") as file:
        return sum(data[()].nbytes for group in file.values() for data in group.values())


def zarr_arrays(folder: Path, steps: Sequence[Sequence[Tensor]]) -> None:
    import zarr

    root = zarr.open_group(folder / "all.zarr", mode="w")
    for step, tensors in enumerate(steps):
        for i, tensor in enumerate(tensors):
            root.create_array(f"{step}-{i}", data=tensor.numpy(), chunks=tuple(tensor.shape), compressors=None)


def zarr_back(folder: Path) -> int:
    import zarr

    return sum(array[:].nbytes for _, array in zarr.open_group(folder / "all.zarr", mode="r").arrays())


FORMATS: dict[str, tuple[Write, Read]] = {
    "raw write, np.fromfile (floor)": (raw, raw_back),
    "instrument, sink=volume (bytes)": (ours("bytes"), ours_back),
    "instrument, list<float>": (ours("list"), ours_back),
    "np.save, a file a tensor": (numpy_files, numpy_back),
    "torch.save, a file a tensor": (torch_files, torch_back),
    "safetensors, a file a step": (safetensors_files, safetensors_back),
    "HDF5, a dataset a tensor": (hdf5, hdf5_back),
    "zarr v3, no compressor": (zarr_arrays, zarr_back),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    tensors = [torch.randn(*shape) for shape in SHAPES]
    size = sum(tensor.nbytes for tensor in tensors)
    steps = [tensors] * max(1, given.megabytes * 2**20 // size)
    total = size * len(steps)
    print(machine())
    print(f"{total / 1e6:.0f} MB in {len(steps)} steps of {len(tensors)} tensors; medians of {given.repeats}\n")
    rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMATS}
    missing = set()
    for _ in range(given.repeats):
        for name, (write, read) in FORMATS.items():
            folder = Path(tempfile.mkdtemp())
            try:
                began = time.perf_counter()
                write(folder, steps)
                written = time.perf_counter()
                assert read(folder) == total, name
                done = time.perf_counter()
                disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                rates[name].append((total / (written - began), total / (done - written), disk / total))
            except ImportError as error:
                missing.add(f"{name}: {error}")
            finally:
                shutil.rmtree(folder)
    print("| format | written, MB/s | read, MB/s | size |")
    print("|---|---|---|---|")
    for name, found in rates.items():
        if found:
            wrote, was_read, share = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"| {name} | {wrote / 1e6:,.0f} | {was_read / 1e6:,.0f} | {share:.2f} |")
    for told in sorted(missing):
        print(f"left out, {told}")


if __name__ == "__main__":
    main()
