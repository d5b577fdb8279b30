"""Kind `collective`: the collective operations of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_results import results_of
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from waiting import wait_until

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_rules
from instrument.hooks import collectives
from instrument.tables.kinds import COLLECTIVES
from instrument.tables.reasons import AWAITED_LATER, NO_COLLECTIVE

RECORD: dict[str, Any] = {"kind": "collective", "action": "record"}
GOT = {**RECORD, "role": "output"}
FIRST, SECOND = [10.0, 11.0], [20.0, 21.0]
SUM = [30.0, 32.0]
# By operation: what is sent and received in rank 0 and in rank 1, by the suffix of the path.
EXPECTED: dict[str, Sequence[dict[str, list[float]]]] = {
    **dict.fromkeys(
        ("all_reduce", "all_reduce functional", "inference"), ({"": FIRST}, {"": SECOND}, {"": SUM}, {"": SUM})
    ),
    "all_reduce max": ({"": FIRST}, {"": SECOND}, {"": SECOND}, {"": SECOND}),
    "all_gather": ({"": FIRST}, {"": SECOND}, *[{".0": FIRST, ".1": SECOND}] * 2),
    **dict.fromkeys(
        ("all_gather tensor", "all_gather functional"), ({"": FIRST}, {"": SECOND}, *[{"": [*FIRST, *SECOND]}] * 2)
    ),
    "reduce_scatter": ({".0": [10.0], ".1": [15.0]}, {".0": [20.0], ".1": [25.0]}, {"": [30.0]}, {"": [40.0]}),
    **dict.fromkeys(
        ("reduce_scatter async", "reduce_scatter functional"),
        ({"": FIRST}, {"": SECOND}, {"": [30.0]}, {"": [32.0]}),
    ),
    "broadcast": ({}, {"": SECOND}, {"": SECOND}, {"": SECOND}),
    "reduce": ({"": FIRST}, {"": SECOND}, {"": SUM}, {}),
    "gather": ({"": FIRST}, {"": SECOND}, {".0": FIRST, ".1": SECOND}, {}),
    "scatter": ({".0": [10.0], ".1": [15.0]}, {}, {"": [10.0]}, {"": [15.0]}),
    "all_to_all": ({"": FIRST}, {"": SECOND}, {"": [10.0, 20.0]}, {"": [11.0, 21.0]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("collectives")


@pytest.fixture(scope="module")
def of_ranks(folder: Path) -> list[dict[str, Any]]:
    """The results of `collective_processes.py` in each of two processes."""
    return results_of("collective_processes.py", folder / "processes", str(folder), processes=2)


def test_each_operation_has_what_it_sends_and_receives(of_ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(of_ranks):
        tensors = results["operations"]["tensors"]
        assert tensors.keys() == EXPECTED.keys()
        for name, (*sent, first, second) in EXPECTED.items():
            operation = {"inference": "all_reduce"}.get(name, name.split()[0])
            expected = {f"input {operation}.0{suffix}": value for suffix, value in sent[rank].items()}
            received = (first, second)[rank]
            expected |= {f"output {operation}.0{suffix}": value for suffix, value in received.items()}
            assert tensors[name] == expected, (rank, name)
        sent_count, got_count = (sum(len(each[at + rank]) for each in EXPECTED.values()) for at in (0, 2))
        coverage = {"sent": [sent_count, sent_count, ""], "got": [got_count, got_count, ""]}
        assert results["operations"]["coverage"] == coverage
    assert {name.split()[0] for name in EXPECTED} - {"inference"} == {*COLLECTIVES}


def test_table_of_collectives(of_ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(of_ranks):
        shared = {"path": "all_reduce.0", "operation": "all_reduce", "reduction": "max", "ranks": [0, 1]}
        shared |= {"dtype": "float32", "bytes": 8, "scope": "local", "rank": rank}
        assert results["operations"]["rows"] == [{"role": role, **shared} for role in ("input", "output")]
        assert results["operations"]["are_timed"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_recording_leaves_training_bit_identical(of_ranks: list[dict[str, Any]], kind: str) -> None:
    for results in of_ranks:
        assert results["trainings"][kind]["is_identical"]
        for expected, fired, cause in results["trainings"][kind]["coverage"].values():
            assert expected == fired > 0
            assert cause == ""
        assert results["trainings"]["joined"]


def test_output_of_ddp_is_the_sum_of_the_inputs(of_ranks: list[dict[str, Any]]) -> None:
    first, second = (
        {(step, role, path): np.array(values) for step, role, path, values in results["trainings"]["ddp"]["tensors"]}
        for results in of_ranks
    )
    assert first.keys() == second.keys()
    outputs = [key for key in first if key[1] == "output"]
    assert {path for *_, path in outputs} >= {"all_reduce.0", "all_reduce.1"}
    for step, role, path in outputs:
        np.testing.assert_array_equal(first[step, role, path], second[step, role, path])
        total = first[step, "input", path] + second[step, "input", path]
        np.testing.assert_allclose(first[step, role, path], total, rtol=1e-6)


def test_fsdp_shards_are_gathered_and_gradients_are_averaged(of_ranks: list[dict[str, Any]]) -> None:
    first, second = (
        {(step, role, path): values for step, role, path, values in results["trainings"]["fsdp2"]["tensors"]}
        for results in of_ranks
    )
    shards = first[0, "input", "all_gather.0"] + second[0, "input", "all_gather.0"]
    assert first[0, "output", "all_gather.0"] == second[0, "output", "all_gather.0"] == shards
    halves = np.split(np.add(*(each[0, "input", "reduce_scatter.0"] for each in (first, second))) / 2, 2)
    for half, each in zip(halves, (first, second), strict=True):
        np.testing.assert_allclose(each[0, "output", "reduce_scatter.0"], half, rtol=1e-5, atol=1e-8)
    # Clipping by a hook gathers shards, which is no operation of the training.
    assert {path.split(".")[0] for *_, path in first} == {"all_gather", "reduce_scatter"}


def test_accumulation_synchronizes_in_the_last_micro_step(of_ranks: list[dict[str, Any]]) -> None:
    for results in of_ranks:
        coverage, micro_steps = results["trainings"]["accumulated"]
        (expected, fired, cause) = coverage["sent"]
        assert (expected, cause) == (fired, "")
        assert micro_steps == [1]


def test_merging_of_rows_is_not_observed(of_ranks: list[dict[str, Any]]) -> None:
    for results in of_ranks:
        merged, ddp = results["trainings"]["merged"], results["trainings"]["ddp"]["coverage"]
        assert {name: merged[name] for name in ("sent", "got")} == {name: ddp[name] for name in ("sent", "got")}


def test_zeroed_messages_are_found_in_their_step(folder: Path, of_ranks: list[dict[str, Any]]) -> None:
    """1% of the inputs of one process, so that the replicas stay equal, with the hook set `messages`."""
    assert of_ranks
    run = instrument.load(folder / "faults")
    zeroed, events = run.effects, run.events.query("rule == 'zero_message'")
    messages = run.stats.query("hook == 'sent' and rank == 1 and path.str.startswith('all_reduce')")
    assert len(messages) >= 100
    assert len(zeroed) == pytest.approx(0.01 * len(messages), abs=3)
    assert len(zeroed)
    assert (zeroed["norm_after"] == 0).all()
    assert {*zeroed["rank"]} == {1}
    assert [*zip(events["rank"], events["step"], events["location"], strict=True)] == [
        (1, step, f"{path} input (sent)") for step, path in zip(zeroed["step"], zeroed["path"], strict=True)
    ]
    assert not {"replicas_equal", "replicas_differ", "coverage"} & {*run.events["rule"]}
    again = rule_events(run, parse_rules({"found": {"rule": "zero_message"}}))
    assert [(each.step, each.message.partition(": ")[2]) for each in again] == [
        (step, message.partition(": ")[2]) for step, message in zip(events["step"], events["message"], strict=True)
    ]
    (cause,) = run.coverage.query("hook == 'lost' and rank == 0")["cause"]
    assert cause == "the hook acts in other processes only"


def test_messages_of_join_are_no_lost_messages(of_ranks: list[dict[str, Any]]) -> None:
    first, second = (results["trainings"] for results in of_ranks)
    # Rank 0 has no batch in the third step.
    assert first["join"][0] == second["join"][0] == second["join"][1] == []
    assert first["join"][1]
    assert all(path.startswith("join.all_reduce.") for path in first["join"][1])
    assert first["join with a fault"] == []
    assert {step for step, _ in second["join with a fault"]} == {1}


def test_replicas_without_synchronization_have_local_rows(of_ranks: list[dict[str, Any]]) -> None:
    (first, one), (second, other) = (results["local"] for results in of_ranks)
    assert [first, second] == [["local", pytest.approx(norm, rel=1e-6)] for norm in (one, other)]
    assert one != other


def test_change_of_what_is_sent_or_received(of_ranks: list[dict[str, Any]]) -> None:
    changed, other = (results["changes"] for results in of_ranks)
    # The reduced tensor is the message. Those that are gathered and broadcast stay unchanged in the process that sends them.
    assert changed["sent"][:3] == [SECOND, [0.0, 0.0, *SECOND], FIRST]
    assert other["sent"][:3] == [SECOND, [0.0, 0.0, *SECOND], [0.0, 0.0]]
    assert changed["got"][:3] == [[0.0] * 2, [0.0] * 4, [0.0] * 2]
    assert other["got"][:3] == [SUM, [*FIRST, *SECOND], FIRST]
    assert changed["sent"][3] == [3, 3, ""]  # without the integers
    assert changed["got"][3] == [4, 4, ""]
    assert other["sent"][3][:2] == [0, 0]


def test_several_probes_observe_and_remove_their_kernels(of_ranks: list[dict[str, Any]]) -> None:
    for results in of_ranks:
        assert results["nested"] == {
            "paths": [["all_reduce.0", "all_reduce.0", "all_reduce.1"], ["all_reduce.0", "all_reduce.1"]],
            "is_installed": [True, False],
        }
        assert not results["is_installed"]


def test_rank_that_does_not_exist_is_refused(of_ranks: list[dict[str, Any]]) -> None:
    for results in of_ranks:
        assert results["refused"].split("\n")[0] == "hooks.sent.ranks: no process has this rank"


def test_failing_hook_on_an_asynchronous_result_raises(of_ranks: list[dict[str, Any]]) -> None:
    for results in of_ranks:
        assert "hook 'failing' (collective)" in results["failing"]
        assert "ValueError: no number" in results["failing"]


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def record(hooks: dict[str, Any], *, wait: bool = True, steps: int = 1) -> Any:
    with instrument.attach(nn.Identity(), hooks) as probe:
        for _ in range(steps):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            if wait:
                work.wait()
            probe.end_step()
        assert torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
    work.wait()  # also after the block
    return probe


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_result_that_is_not_awaited_is_in_coverage() -> None:
    with pytest.warns(match="did not wait for the result"):
        probe = record({"got": GOT}, wait=False)
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "did not wait for the result" in row["cause"]


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_result_awaited_when_the_hook_is_not_scheduled_is_in_coverage() -> None:
    hooks = {"first": {**GOT, "steps": [0]}, "second": {**GOT, "steps": [1]}, "all": GOT}
    with pytest.warns(match="in a later step"), instrument.attach(nn.Identity(), hooks) as probe:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        probe.end_step()
        work.wait()
        probe.end_step()
    assert probe.stats[["hook", "step"]].to_numpy().tolist() == [["all", 1]]
    coverage = {row["hook"]: (row["expected"], row["fired"], row["cause"]) for row in probe.coverage()}
    assert coverage["first"] == (1, 0, AWAITED_LATER)
    assert coverage["second"] == (1, 0, NO_COLLECTIVE)
    assert coverage["all"] == (1, 1, "")


@pytest.mark.usefixtures("process_group")
def test_groups_that_are_destroyed_or_unknown() -> None:
    backend = dist.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    unknown = dist.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    unknown._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with pytest.warns(match="did not wait"), instrument.attach(nn.Identity(), {"got": GOT}) as probe:
        inside: Any = dist.new_group([0])  # also created in the block
        after: Any = dist.new_group([0])
        work: Any = dist.all_reduce(torch.ones(3), group=inside, async_op=True)
        later: Any = dist.all_reduce(torch.ones(3), group=after, async_op=True)
        dist.destroy_process_group(inside)
        work.wait()
        unknown.allreduce([torch.ones(3)]).wait()
        probe.end_step()
    dist.destroy_process_group(after)
    later.wait()
    assert [None if ranks is None else [*ranks] for ranks in probe.collectives["ranks"]] == [[0], None]


class Event:
    """An event of a device whose work is complete when the host waits for it. Each one is recorded 2 ms after the last one."""

    time = 0.0
    waited: ClassVar[list[float]] = []

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert (device.type, enable_timing) == ("cuda", True)

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:0"
        Event.time += 2.0
        self.time = Event.time

    def synchronize(self) -> None:
        self.waited.append(self.time)

    def elapsed_time(self, end: Event) -> float:
        assert end.time in self.waited
        return end.time - self.time


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("accelerator", ["cuda", "xpu"])
def test_duration_on_a_device_is_read_after_the_hook(monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
    monkeypatch.setattr(collectives, "_device_of", lambda tensors: torch.device("cuda", 0))
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    Event.waited.clear()
    with instrument.attach(nn.Identity(), {"sent": RECORD, "got": GOT}) as probe:
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.all_reduce(torch.ones(3))
        assert not Event.waited
        probe.end_step()
    seconds = probe.collectives["seconds"]
    assert seconds.tolist() == [0.002] * 4 if accelerator == "cuda" else seconds.isna().all()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_sparse_message() -> None:
    tensor = torch.tensor([1.0, 0.0, 2.0, 0.0]).to_sparse()
    with instrument.attach(nn.Identity(), {"sent": RECORD, "got": GOT}) as probe:
        dist.all_reduce(tensor)
        probe.end_step()
    assert probe.collectives["bytes"].tolist() == [2 * 8 + 2 * 4] * 2  # indices and values
    assert probe.stats["mean"].tolist() == [3 / 4] * 2


@pytest.mark.usefixtures("process_group")
def test_communication_hook_without_python_futures_is_refused() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    for observed in (model, model.module):
        with pytest.raises(instrument.ConfigError, match=r"hooks.sent.kind: .* FP16_COMPRESS(.|\n)*fp16_compress_hook"):
            instrument.attach(observed, {"sent": RECORD}).__enter__()
    with instrument.attach(nn.Linear(3, 3), {"sent": RECORD}) as probe:  # is not in the wrapper
        dist.all_reduce(torch.ones(3))
        probe.end_step()


@pytest.mark.usefixtures("process_group")
def test_works_that_nothing_waits_for_are_freed() -> None:
    tensors = []
    with pytest.warns(match="fired 0 of 9 times"), instrument.attach(nn.Identity(), {"got": GOT}) as probe:
        for _ in range(9):
            tensors.append(weakref.ref(tensor := torch.ones(3)))
            dist.all_reduce(tensor, async_op=True)
            probe.end_step()
        del tensor
        wait_until(lambda: sum(each() is not None for each in tensors) <= 1)  # a thread of the group ends the works


@pytest.mark.usefixtures("process_group")
def test_asynchronous_work_behaves_like_that_of_the_group() -> None:
    tensor = torch.ones(3)
    with instrument.attach(nn.Identity(), {"got": GOT}) as probe:
        work: Any = dist.all_reduce(tensor, async_op=True)
        (value,) = work.get_future().wait()
        assert value.tolist() == [1.0] * 3
        assert work.wait(timeout=timedelta(seconds=60))
        assert work.is_completed()
        assert work.synchronize() is None
        assert work.result()[0].tolist() == [1.0] * 3
        assert work.is_success()
        with pytest.raises(RuntimeError, match="recv"):
            work.source_rank()
        probe.end_step()
    assert probe.stats["numel"].tolist() == [3]


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_changed_result_that_the_group_writes_at_each_wait() -> None:
    outputs = [torch.zeros(2) for _ in range(2)]
    fault = {"kind": "collective", "action": "scale", "factor": 10.0, "role": "output"}
    with instrument.attach(nn.Identity(), {"fault": fault}) as probe:
        dist.reduce_scatter_tensor(outputs[0], torch.ones(2))
        work: Any = dist.reduce_scatter_tensor(outputs[1], torch.ones(2), async_op=True)
        assert work.wait()
        assert work.wait()
        probe.end_step()
    assert [each.tolist() for each in outputs] == [[10.0, 10.0]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_hooks_are_not_compiled_with_the_model() -> None:
    messages = []
    for hook in ({"layers": "**", "kind": "parameter_grad_micro", "action": "record"}, GOT):
        torch.compiler.reset()
        model = torch.compile(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)), backend="eager")
        with instrument.attach(model, {"hook": hook}) as probe:
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                probe.end_step()
        assert len(probe.stats)
        messages.append(probe.events.query("rule == 'graph_break'")["message"].tolist())
    assert messages[0] == messages[1]


@pytest.mark.usefixtures("process_group")
def test_selection_of_operations_and_paths() -> None:
    hooks = {
        "others": {**RECORD, "functions": "all_g*"},
        "reduced": {**RECORD, "functions": ["all_reduce", "broadcast"]},
        "first": {**RECORD, "path": "all_reduce.0"},
        "late": {**RECORD, "start": 1},
        "elsewhere": {**RECORD, "ranks": [0]},
    }
    with instrument.attach(nn.Identity(), hooks) as probe:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(2))
            dist.all_gather([torch.empty(2)], torch.ones(2))
            probe.end_step()
    paths = probe.stats.groupby("hook")["path"].apply(list).to_dict()
    both = ["all_reduce.0", "all_reduce.1"]
    assert paths == {
        "others": ["all_gather.0"] * 2,
        "reduced": both * 2,
        "first": ["all_reduce.0"] * 2,
        "late": [*both, "all_gather.0"],
        "elsewhere": [*both, "all_gather.0"] * 2,
    }


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_phases_and_counts_during_the_block() -> None:
    hooks = {"trained": RECORD, "evaluated": {**RECORD, "phase": "eval"}}
    with instrument.attach(nn.Identity(), hooks) as probe:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
            probe.end_step()
        with probe.evaluating():
            dist.all_reduce(torch.ones(2))
        assert [row["fired"] for row in probe.coverage()] == [2, 1]
    assert [row["expected"] for row in probe.coverage()] == [2, 1]
    rows = probe.stats[["step", "phase", "hook", "numel"]].to_numpy().tolist()
    assert rows == [[0, "train", "trained", 3], [1, "train", "trained", 3], [2, "eval", "evaluated", 2]]


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_fraction_of_messages_is_drawn_with_the_seed() -> None:
    hooks = {"fault": {"kind": "collective", "action": "scale", "factor": 0.0, "fraction": 0.25}}
    runs = []
    for seed in (1, 1, 2):
        state = torch.get_rng_state()
        with instrument.attach(nn.Identity(), hooks, seed=seed) as probe:
            for _ in range(200):
                dist.all_reduce(torch.ones(3))
                probe.end_step()
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(probe.effects["step"].tolist())
        (row,) = probe.coverage()
        assert (row["expected"], row["fired"], row["cause"]) == (len(runs[-1]), len(runs[-1]), "")
    assert runs[0] == runs[1] != runs[2]
    assert 20 < len(runs[0]) < 85  # 4 standard deviations of a binomial distribution around 50, with a margin


@pytest.mark.usefixtures("process_group")
def test_all_actions_and_tables() -> None:
    seen: list[tuple[str, list[float]]] = []

    def call(tensor: Tensor, context: instrument.Context) -> None:
        seen.append((context.path, tensor.tolist()))

    hooks = {
        "large": {"kind": "collective", "action": "clip", "value": 2.0},
        "called": {"kind": "collective", "action": "call", "fn": {"_target_": call}},
        "all": {**RECORD, "role": "output", "quantiles": [0.5], "histogram": 2, "stats": ["mean"], "slice": "1:"},
        "rare": {**RECORD, "when": {"stat": "l2", "above": 100.0}},
    }
    with instrument.attach(nn.Identity(), hooks) as probe:
        dist.all_reduce(tensor := torch.arange(5.0))
        probe.end_step()
    assert seen == [("all_reduce.0", [0.0, 1.0, 2.0, 2.0, 2.0])]
    assert tensor.tolist() == seen[0][1]
    assert probe.stats.loc[0, "mean"] == 7 / 4
    assert probe.distributions.loc[0, "quantiles"].tolist() == [2.0]
    assert probe.effects.loc[0, "changed"] == 2


def test_single_process_is_reported() -> None:
    with pytest.warns(match="no collective operation"), instrument.attach(nn.Identity(), {"sent": RECORD}) as probe:
        probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": "**"}, "'layers' requires modules or parameters"),
        ({"functions": "allreduce"}, "'allreduce' matches no collective operation; these are all_reduce"),
        ({"ranks": [-1]}, "hooks.sent.ranks.0"),
        ({"fraction": 0.0}, "hooks.sent.fraction"),
        ({"units": [0]}, "'units' requires modules or parameters"),
        ({"kind": "forward", "layers": "**", "fraction": 0.5}, "'fraction' requires kind collective"),
        ({"kind": "loss", "ranks": [0]}, "'ranks' requires kind collective"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(instrument.ConfigError, match=message):
        instrument.attach(nn.Identity(), {"sent": {**RECORD, **fields}}).__enter__()
