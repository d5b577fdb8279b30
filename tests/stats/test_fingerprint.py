"""Fingerprints: equal on every path, and different for every change of bits, positions, shape or dtype.

The right values are computed with Python's integers from the definition in `instrument.stats.fingerprint`.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attached_runs import forward_steps, train_steps
from conftest import KERNEL_DEVICE
from hook_runs import Calls, record
from torch import Tensor, nn

import instrument
from instrument.config.parse import parse_rules
from instrument.config.spec_file import read_specs
from instrument.errors import ConfigError
from instrument.rules.requirements import check_rules
from instrument.stats import cpu_kernel, device_kernel
from instrument.stats.cpu_kernel import make_slab
from instrument.stats.fingerprint import fingerprint, projection, sums_of_bits
from instrument.stats.measure import measure
from instrument.stats.sums import COLUMNS, INDEX, Sums, extremes, merged, needs_of, statistics_of, totals
from instrument.tables.statistics import BITS_HIGH, BITS_LOW
from instrument.training.distributed.strategies import reduce_problems

GOLDEN, SECOND, WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64
Words = np.ndarray[Any, np.dtype[np.uint64]]
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def mixed(number: int) -> int:
    product = number * SECOND % WORD
    return (product ^ product >> 32) * GOLDEN % WORD


KEYS = [mixed(mixed(at + 1) + 1) for at in range(2048)]


def expected(tensor: Tensor) -> int:
    """Return the fingerprint of a strided tensor by the definition, with Python's integers."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data, size = flat.view(torch.uint8).numpy().tobytes(), 1024 * tensor.element_size()
    total = 0
    for tile in range(-(-len(data) // size)):
        words = struct.unpack(f"<{size // 8}Q", data[tile * size :][:size].ljust(size, b"\0"))
        number = 0
        for at, word in enumerate(words):
            x = word ^ KEYS[at]
            number ^= x % 2**32 * (x >> 32)
            for bits in (11, 27, 43):
                number ^= (x << bits | x >> 64 - bits) % WORD
        total += mixed(number ^ (tile + 1) * GOLDEN % WORD)
    form = zlib.crc32(str(tensor.dtype).encode())
    for length in (tensor.dim(), *tensor.shape):
        form = (form ^ length) * SECOND % WORD
        form ^= form >> 32
    return (total + (form >> 12) * GOLDEN + WORD // 2) % WORD - WORD // 2


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose bits are random: also NaN with any payload, and infinities."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).to(torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


def by_slab(tensor: Tensor) -> int | None:
    """Return the fingerprint of the single call that measures plain tensors; None if it is not plain."""
    slab = make_slab(len(COLUMNS))
    if not slab.add(tensor, 0, None, 2):
        return None
    return int(Sums(np.frombuffer(slab.take()[0]).reshape(1, -1)).fingerprint[0])


@pytest.fixture(params=["native", "portable"])
def kernel(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        yield
    else:
        with mock.patch.object(cpu_kernel, "native", None):
            yield


@pytest.mark.spread(6)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fingerprint_is_that_of_the_definition(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 5), (1024,), (2, 3, 4, 100), (0, 4)):
        tensor = random_bits(shape, dtype)
        assert fingerprint(tensor) == expected(tensor), shape


@pytest.mark.spread(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 1023, 1024, 1040, 4095, 4096, 5120, 9001, 40_000])
def test_kernel_of_hooks_gives_the_same_with_the_sums(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count).double() if dtype == torch.float64 else random_bits((count,), dtype)
    assert by_slab(tensor.view(1, -1)) == fingerprint(tensor.view(1, -1))
    finite = torch.randn(count)
    special = finite.clone()
    special[:: count // 2] = torch.nan
    special[1 :: count // 2] = -torch.inf
    for values in (finite, special, finite.relu(), finite + 1e4):  # the last one is read again, relative to the mean
        slab, given = make_slab(len(COLUMNS)), values.to(dtype)
        for further in (1, 3):
            assert slab.add(given, 0, None, further)
        one, other = np.frombuffer(slab.take()[0]).reshape(2, -1)[:, :10]
        assert one.tobytes() == other.tobytes()


@pytest.mark.usefixtures("kernel")
def test_fingerprint_does_not_depend_on_strides() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    same = [
        tensor.to(memory_format=torch.channels_last),
        tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.randn(7, 2, 3, 4, 6)[3, ..., 1:].copy_(tensor),
        torch.view_as_real(torch.complex(tensor, tensor))[..., 1],
        torch.complex(tensor, -tensor).conj().imag,
        nn.Parameter(tensor),
    ]
    assert {int(fingerprint(each)) for each in same} == {int(fingerprint(tensor))} == {expected(tensor)}
    expanded = torch.randn(1, 5).expand(4, 5)
    assert fingerprint(expanded) == fingerprint(expanded.contiguous())
    assert by_slab(tensor.to(memory_format=torch.channels_last)) is None
    assert fingerprint(tensor.view(6, 20)) != fingerprint(tensor)
    assert fingerprint(tensor.view(torch.int32)) != fingerprint(tensor)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_fingerprint_of_sparse_and_nested_tensors() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    coo = dense.to_sparse()
    moved = torch.tensor([[1.0, 0.0], [2.0, 0.0]]).to_sparse()
    assert fingerprint(coo) == fingerprint(dense.to_sparse_csr())
    assert len({int(fingerprint(each)) for each in (coo, moved, dense)}) == 3
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    others = [torch.cat(parts)[:3], torch.cat(parts)[3:]]
    one, other = (torch.nested.nested_tensor(each) for each in (parts, others))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(torch.nested.nested_tensor(parts))


def changed_numbers(words: Words, at: np.ndarray[Any, Any], new: Words) -> Words:
    """Return which bits of the number of the first tile change if one word changes, uint64 [changes]."""
    keys = np.array(KEYS, np.uint64)[at]

    def term(word: Words) -> Words:
        x: Words = word ^ keys
        rotated = [x << np.uint64(bits) | x >> np.uint64(64 - bits) for bits in (11, 27, 43)]
        return (x & np.uint64(2**32 - 1)) * (x >> np.uint64(32)) ^ rotated[0] ^ rotated[1] ^ rotated[2]

    return term(new) ^ term(words[at])


@pytest.mark.slow
@pytest.mark.parametrize("words", ["random", "zeros", "keys", "factors"])
def test_a_million_flips_of_one_bit_and_swaps_change_the_fingerprint(words: str) -> None:
    random = np.random.default_rng(0)
    count, tile = 1_000_000, 512
    keys = np.array(KEYS[:tile], np.uint64)
    halves = random.choice([0, 1, 2, 3, 2**31, 2**31 - 1, 2**32 - 1, 2**32 - 2], (2, tile)).astype(np.uint64)
    factors = keys ^ (halves[0] | halves[1] << np.uint64(32))  # factors that hide others, or only shift them
    content = {"random": random.integers(0, 2**64, tile, np.uint64), "zeros": np.zeros(tile, np.uint64), "keys": keys}
    memory = content.get(words, factors)
    at, bit = random.integers(0, tile, count), random.integers(0, 64, count).astype(np.uint64)
    assert changed_numbers(memory, at, memory[at] ^ np.uint64(1) << bit).all()
    if words == "random":  # two words that change places
        other = random.integers(0, tile, count)
        swapped = changed_numbers(memory, at, memory[other]) ^ changed_numbers(memory, other, memory[at])
        assert swapped[at != other].all()
    # The arithmetic above is that of the kernel: a change in one tile changes the fingerprint one to one.
    tensor = torch.from_numpy(memory.astype(np.int64))
    for position, flipped in zip(at[:200].tolist(), bit[:200].tolist(), strict=True):
        changed = tensor.clone()
        changed[position] ^= -(2**63) if flipped == 63 else 1 << flipped
        assert fingerprint(changed) != fingerprint(tensor)


@pytest.mark.spread(1)
@pytest.mark.parametrize("value", [0, 1, 0x3F8000003F800000])
def test_flips_of_one_bit_at_different_positions_change_the_fingerprint_differently(value: int) -> None:
    words, bits = np.full(2048, value, np.uint64), np.uint64(1) << np.arange(64, dtype=np.uint64)
    at = np.repeat(np.arange(2048), 64)
    assert len(np.unique(changed_numbers(words, at, words[at] ^ np.tile(bits, 2048)))) == 2048 * 64
    numbers = torch.zeros(8, dtype=torch.int32)
    numbers[2], numbers[6] = 4, 2  # with multiples of the position as keys, these are equal alone
    assert fingerprint(torch.where(numbers == 4, 4, 0)) != fingerprint(torch.where(numbers == 2, 2, 0))


@pytest.mark.usefixtures("kernel")
def test_changes_that_sums_miss_change_the_fingerprint() -> None:
    tensor = torch.randn(3000)
    tensor[:1500] = 0.0
    nan = tensor.clone()
    nan[7] = torch.nan
    payload = nan.clone()
    payload.view(torch.int32)[7] += 1
    swapped = tensor.clone()
    swapped[[2000, 2001]] = tensor[[2001, 2000]]
    tiles = torch.cat([tensor[1024:2048], tensor[:1024], tensor[2048:]])
    signed = tensor.clone()
    signed[11] = -0.0
    changes = [tensor, nan, payload, swapped, tiles, signed, -tensor, tensor.roll(1), tensor.roll(1024), tensor.flip(0)]
    changes += [torch.cat([tensor, torch.zeros(1)]), tensor[:-1], tensor[torch.randperm(3000)]]
    assert len({int(fingerprint(each)) for each in changes}) == len(changes)


def test_hooks_record_fingerprints_as_int64() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Conv1d(5, 2, 3, padding=1))
    outputs: dict[str, Tensor] = {}
    for name, module in net.named_children():
        module.register_forward_hook(lambda _, args, output, name=name: outputs.__setitem__(name, output.detach()))
    probe = forward_steps(
        net,
        {"bits": record("forward", "*", stats=["fingerprint"]), "others": record("forward", "0", stats=["mean"])},
        [torch.randn(5, 4)],
    )
    rows = probe.stats
    assert str(rows["fingerprint"].dtype) == "Int64"
    bits = rows[rows["hook"] == "bits"].set_index("layer")["fingerprint"]
    assert bits.to_dict() == {name: expected(output) for name, output in outputs.items()}
    assert rows[rows["hook"] == "others"]["fingerprint"].isna().all()


@pytest.mark.slow
def test_fingerprint_next_to_another_table_is_from_the_same_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    sums = cpu_kernel.native.sums
    kernel = mock.Mock(wraps=cpu_kernel.native, sums=lambda *given: reads.append(given[3]) or sums(*given))
    monkeypatch.setattr(cpu_kernel, "native", kernel)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.randn(3, 700).to(dtype)
        for given in (tensor, tensor.t(), tensor.abs().to(torch.int32)):
            hooks = {"bits": record("forward", stats=["mean", "l1", "fingerprint"], histogram=2)}
            probe = forward_steps(Calls(lambda x: x.clone()), hooks, [given])
            assert probe.stats["fingerprint"].tolist() == [expected(given)]
    assert [further for further in reads if further >= 2] == 4 * [3, 3]
    assert kernel.bits.call_count == 4  # for the integers


def test_fingerprints_of_empty_and_nan_tensors_are_recorded() -> None:
    for tensor in (torch.empty(0, 3), torch.full((2, 3), torch.nan), torch.tensor(True)):
        probe = forward_steps(Calls(lambda x: x.clone()), {"bits": record("forward", stats=["fingerprint"])}, [tensor])
        assert probe.stats["fingerprint"].tolist() == [expected(tensor)]


def test_fingerprints_in_files_are_exact(tmp_path: Any) -> None:
    net = nn.Linear(2, 2)
    hooks = {"bits": record("step_post", role="param", stats=["mean", "fingerprint"])}
    batches = [torch.randn(3, 2) for _ in range(3)]
    train_steps(net, hooks, batches, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    last = run.stats[run.stats["step"] == 2].set_index("path")["fingerprint"]
    assert last.to_dict() == {name: expected(parameter) for name, parameter in net.named_parameters()}


@pytest.mark.slow
def test_compiled_model_records_the_fingerprints_of_its_tensors() -> None:
    torch.manual_seed(0)
    net, batch = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(5, 4)
    compiled = torch.compile(net, backend="aot_eager")
    probe = forward_steps(compiled, {"bits": record("forward", "1", stats=["fingerprint"])}, [batch])
    assert probe.stats["fingerprint"].tolist() == [expected(net(batch))]


# Without a GPU, Triton's interpreter runs the kernel, and NumPy warns of sums modulo 2^64.
@pytest.mark.spread(1)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", device_kernel.DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 1023, 4096, 9001])
def test_kernel_for_gpus_gives_the_same_bits(dtype: torch.dtype, count: int) -> None:
    flat = random_bits((count,), dtype)
    results, without = (torch.full((11,), math.nan, dtype=torch.float64, device=KERNEL_DEVICE) for _ in range(2))
    device_kernel.measure_by_kernel(flat.to(KERNEL_DEVICE), results, with_bits=True)
    device_kernel.measure_by_kernel(flat.to(KERNEL_DEVICE), without)
    sums = sums_of_bits(flat)
    assert results[9:].tolist() == [sums[BITS_LOW], sums[BITS_HIGH]]
    assert torch.equal(results[:9].nan_to_num(), without[:9].nan_to_num())
    assert without[9:].isnan().all()


def test_saved_and_loaded_weights_have_the_fingerprints_of_the_parameters() -> None:
    net = nn.Linear(3, 4)
    hooks = {kind: record(kind, stats=["fingerprint"]) for kind in ("state_dict_post", "load_state_dict_pre")}
    with instrument.attach(net, hooks) as probe:
        net.load_state_dict(net.state_dict())
        probe.end_step()
    weights = {name: expected(parameter) for name, parameter in net.named_parameters()}
    for _, rows in probe.stats.groupby("hook"):
        assert rows.set_index("path")["fingerprint"].to_dict() == weights


def test_row_of_several_processes_has_no_fingerprint() -> None:
    parts = torch.tensor([[*measure(torch.randn(5), needs_of(("fingerprint",))).row] for _ in range(2)])
    for each in parts:
        each[[INDEX["bits_low"], INDEX["bits_high"], INDEX["form"]]] = 1.0
    maxima = extremes(parts).amax(0, keepdim=True)
    whole = merged(maxima, totals(parts, maxima.expand(2, -1)).sum(0, keepdim=True))
    rms, fingerprints = statistics_of(whole.numpy(), ("rms", "fingerprint"))
    assert np.isfinite(rms).all()
    assert np.isnan(fingerprints).all()


def test_fingerprint_that_cannot_be_recorded_is_an_error() -> None:
    hooks = read_specs({"bits": record("forward", stats=["fingerprint"]), "every": record("forward", stats="all")})
    (problem,) = reduce_problems(None, hooks)
    assert problem.where == "hooks.bits.stats"
    assert problem.fix == "set reduce=none"
    rules = parse_rules({"replicas": {"rule": "replicas_differ"}})
    with pytest.raises(ConfigError, match="no hook records what the rule reads: fingerprint"):
        check_rules(rules, read_specs({"outputs": record("forward", stats=["fingerprint"])}))
    check_rules(rules, read_specs({"weights": record("step_post", role="param", stats=["fingerprint"])}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_models_of_libraries_have_the_fingerprints_of_their_tensors(name: str) -> None:
    torch.manual_seed(0)
    if name == "resnet":
        net: nn.Module = (
            pytest.importorskip("torchvision").models.resnet18(num_classes=3).to(memory_format=torch.channels_last)
        )
        batch = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    else:
        net, batch = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    outputs: dict[str, Tensor] = {}
    for path, module in net.named_modules():
        if not [*module.children()] and not isinstance(module, nn.ReLU):  # which are called several times, in place
            module.register_forward_hook(
                lambda _, args, output, path=path: outputs.__setitem__(path, output.detach().clone())
            )
    probe = forward_steps(net, {"bits": record("forward", "**", stats=["fingerprint"])}, [batch])
    found = probe.stats.drop_duplicates("layer").set_index("layer")["fingerprint"].to_dict()
    assert len(outputs) > 5
    assert {path: found[path] for path in outputs} == {path: expected(output) for path, output in outputs.items()}


def test_fingerprint_is_printed_exactly_and_has_no_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.randn(3, 4)
    hooks = {"shown": {"layers": ".", "kind": "forward", "action": "print", "stats": ["fingerprint"]}}
    forward_steps(nn.Identity(), hooks, [tensor])
    assert f"fingerprint {expected(tensor)}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="fingerprint is no quantity"):
        parse_rules({"high": {"watch": "shown", "stat": "fingerprint", "above": 1}})


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1024,), (70, 33)], ids=str)
def test_projection_is_a_sum_with_signs(shape: tuple[int, ...]) -> None:
    one, other = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    sums = [projection(each) for each in (one, other, one + other)]
    torch.testing.assert_close(sums[0] + sums[1], sums[2])
    single = torch.zeros(shape).flatten()
    for at in range(0, len(single), 200):
        single.zero_()[at] = 2.0
        assert abs(projection(single.view(shape))) == 2.0
    torch.testing.assert_close(projection(one.bfloat16()), projection(one.bfloat16().float()))
    torch.testing.assert_close(projection(torch.complex(one, other)), projection(torch.stack([one, other], -1)))
    assert projection(torch.ones(3, dtype=torch.int64)) is None


def test_projections_have_the_l2_as_standard_deviation() -> None:
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([projection(torch.randn(64, 50, generator=generator)) for _ in range(2000)])
    assert found.std() == pytest.approx(math.sqrt(64 * 50), rel=0.08)  # 5 standard errors
