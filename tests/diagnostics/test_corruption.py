"""Silent corruption: bits that flip in memory, and results that differ, are found and named, and nothing else is."""

import json
import math
import re

import pytest
import torch

from hpclm.base.errors import ConfigError, CorruptedError, DivergedError
from hpclm.diagnostics import corruption
from hpclm.diagnostics.corruption import Verifier, findings
from hpclm.diagnostics.report import bad_nodes
from hpclm.distributed.context import single
from hpclm.engine.checksum import MIN_PIECE_VALUES, checksums, counts, pieces
from hpclm.engine.native import NativeEngine
from tests import ranks
from tests.diagnostics import flips
from tests.engine.sharded import made
from tests.engine.test_exact import LAYOUTS
from tests.events import began, note, of_kind
from tests.forks import Ranks
from tests.runs import ROOT, losses

EXPERTS = [
    "model.experts.count=4",
    "model.experts.ffn=16",
    "model.experts.router_score=sigmoid",
    "model.experts.router_choice_bias=true",
]
EXPERTS += ["model.experts.balance_bias=0.01", "model.experts.balance_step=0.1", "parallel.expert=2"]
MANY = {
    **LAYOUTS,
    "native-bf16": ["engine.precision=bf16"],
    "native1-bf16": ["engine.zero_stage=1", "engine.precision=bf16"],
    "experts": EXPERTS,
    "experts-native1": [*EXPERTS, "engine.zero_stage=1", "optim.name=muon"],
    "experts-fsdp2": [*EXPERTS, "engine.name=fsdp2"],
    "experts-pp2": [*EXPERTS[:-1], "engine.name=pipelining", "parallel.pipeline=2"],
}


def words(name, processes):
    own = ["batch.micro_size=1", f"batch.global_size={2 * processes}", "model.layers=2", "model.dropout=0.1"]
    return [*own, "engine.precision=fp32", *MANY[name]]


def table(always, others, sizes=(2, 4)):
    """Some layouts always, each with its number of processes, the others with -m whole."""
    cases = [(name, size) for name in others for size in sizes if size == 4 or "shard2" not in name]
    whole = [pytest.param(*case, marks=pytest.mark.whole) for case in cases]
    return pytest.mark.parametrize("name, processes", [*always, *whole])


FIRST = ("fsdp2", 2), ("experts", 2)


@table(FIRST, MANY)
def test_every_bit_that_flips_between_two_updates_is_found_and_its_rank_named(name, processes):
    """With -m whole 7 bits for each other layout and number of processes, 220 in all."""
    seeds = range(1, 4) if (name, processes) in FIRST else range(100 * processes, 100 * processes + 7)
    for found_by_rank in ranks.run(
        processes, flips.flipped, words(name, processes), seeds, 5, math.inf, 0, "-pp2" not in name
    ):
        for victim, found, _ in found_by_rank:
            assert found and set(found) == {((victim,), True)}


PAIRS = ["experts", "native1-shard2", "fsdp2-shard2", "native-tp2", "pipelining-pp2"]
COMPARED = ["native", "deepspeed0", "native-bf16", *PAIRS]


@table([("native", 3)], COMPARED, sizes=[4])
def test_replicas_that_differ_are_found_where_no_step_is_watched(name, processes):
    """The odd one of three or more is named, otherwise both. What has vanished without a trace is not found."""
    seeds = range(4, 8) if processes == 3 else range(1, 8)
    for results in ranks.run(processes, flips.flipped, words(name, processes), seeds, 6, 1e-9, 2, "-pp2" not in name):
        for victim, found, differs in results:
            assert bool(found) == differs
            for at_fault, certain in found:
                assert victim in at_fault and certain == (len(at_fault) == 1)
                assert certain == (processes > 2) or name in PAIRS
        assert any(differs for _, _, differs in results)


@pytest.mark.parametrize(
    "name, size, named",
    [
        ("native", 2, ((1,), True)),
        *(
            pytest.param(*case, marks=pytest.mark.whole)
            for case in [
                ("fsdp2", 2, ((1,), True)),
                ("fairscale", 2, ((1,), True)),
                ("deepspeed3", 4, ((3,), True)),
                ("native-tp2", 4, ((2, 3), False)),
                ("pipelining-pp2", 4, ((1, 3), False)),
                ("deepspeed-pp2", 4, ((1, 3), False)),
                ("experts", 4, ((2, 3), False)),
            ]
        ),
    ],
)
def test_a_rank_that_computes_the_same_loss_twice_with_two_results_is_named_with_those_it_computes_with(
    name, size, named
):
    for found in ranks.run(size, flips.miscomputed, words(name, size), size - 1):
        assert found == [named]


@table([], MANY)
def test_checks_change_nothing(name, processes):
    assert ranks.run(processes, flips.undisturbed, words(name, processes), 3) == [True] * processes


class Older(NativeEngine):
    """An engine of one's own that evaluates as engines had to before there were checks."""

    def evaluate(self, batches):
        return super().evaluate(batches)


def alone(engine_class=None):
    """A verifier that watches every step of one process, and what its steps are."""
    run, engine, batches, context = made(["batch.global_size=2", "batch.micro_size=1", "engine.precision=fp32"])
    engine.__class__ = engine_class or engine.__class__
    return engine, batches, run, Verifier(engine, engine.mesh, context, math.inf)


def test_a_bit_that_flips_in_a_count_of_updates_is_found():
    engine, *others = alone()

    def act(step, done):
        if step == 3 and not done:
            next(counts(engine.optimizer)).view(1).view(torch.int32)[0] ^= 1 << 21

    assert flips.trial(engine, *others, 0, 5, act) == [((0,), True)]


def test_of_an_engine_whose_evaluation_is_of_all_replicas_no_loss_is_computed_twice(caplog):
    assert flips.trial(*alone(Older), 0, 2, lambda *_: None) == []
    assert "Older.evaluate has no parameter `alone`, so losses are not computed twice" in caplog.text


def answers(*digests, losses=("0x1p+1", "0x1p+1"), replicas=None):
    return [
        {"shared": [[0, 4, False, digest]], "changed": False, "replica": rank, "losses": list(losses) if rank else []}
        for rank, digest in enumerate(digests)
    ]


def test_the_majority_is_right_and_without_one_all_are_named():
    assert findings(answers("a", "a", "a"), True) == []
    [finding] = findings(answers("a", "b", "a"), True)
    assert finding.ranks == (1,) and finding.certain and "2 ranks that hold the same" in finding.text
    for digests in ("ab", "aabb", "abc"):
        [finding] = findings(answers(*digests), True)
        assert finding.ranks == tuple(range(len(digests))) and not finding.certain
    watched = answers("a", "b")
    watched[1]["changed"] = True  # so the other one is right
    assert [(each.ranks, each.certain) for each in findings(watched, True)] == [((1,), True)]


def test_losses_must_be_equal_to_the_last_bit_only_where_kernels_give_the_same_bits():
    near = answers("a", "a", losses=((2.0).hex(), (2.001).hex()))
    assert [each.ranks for each in findings(near, True)] == [(1,)] and findings(near, False) == []
    far = answers("a", "a", losses=((2.0).hex(), (2.01).hex()))
    assert [each.ranks for each in findings(far, False)] == [(1,)]
    nan = answers("a", "a", losses=("nan", "nan"))
    assert findings(nan, True) == findings(nan, False) == []


def test_every_bit_of_every_value_counts_in_a_checksum():
    whole = torch.randn(2 * MIN_PIECE_VALUES + 5)
    tensors = [
        torch.randn(3, 5),
        whole[1:],
        torch.zeros(0),
        torch.randn(1),
        whole[: MIN_PIECE_VALUES + 1],
        torch.ones(()),
    ]
    divided = pieces(tensors)
    before = checksums(divided, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    for tensor in tensors:
        values = tensor.numel()
        for index in {0, values - 1, *torch.randint(values, (9,), generator=draw).tolist()} if values else ():
            bits, bit = tensor.view(-1).view(torch.int32), int(torch.randint(32, (1,), generator=draw))
            flipped = 1 << bit if bit < 31 else -(1 << 31)
            bits[index] ^= flipped
            assert (checksums(divided, torch.device("cpu")) != before).any()
            bits[index] ^= flipped
    assert torch.equal(checksums(pieces(tensors), torch.device("cpu")), before) and len(before) == 4


@pytest.fixture
def run(tiny, tmp_path):
    """Three processes of a run in which a bit flips in step 8: exit codes, and what was logged."""

    def start(*words):
        own = ["checkpoint.every=2", "batch.global_size=6", "batch.micro_size=2", "cluster.preflight=false", *words]
        flipped = {"PYTHONPATH": ROOT, "TEST_FLIPPED": tmp_path / "flipped"}
        with Ranks(3, tiny("run", *own), before=flips.flipping_memory, **flipped) as processes:
            codes = {code for code, _ in processes.wait().values()}
        return codes, (tmp_path / "run/log.txt").read_text()

    return start


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_ends_with_85_names_rank_and_node_and_resumes_from_a_checkpoint_that_was_good(run, tmp_path):
    codes, log = run()
    assert codes == {85} and log.count(" E ") == 1
    assert "E silent corruption detected after step 8: rank 1 on " in log and "2 ranks that hold the same" in log, log
    assert "The run resumes from step 6, which was good when it was saved" in log
    [row] = of_kind(tmp_path / "run", "corrupt")
    assert row["step"] == 8 and len(row["bad"]) == 1 and bad_nodes([str(tmp_path / "run")]) == row["bad"]
    codes, _ = run()
    assert codes == {0}
    lost = {row["step"]: row["loss"].hex() for row in rows(tmp_path / "run/metrics.lost.jsonl")}
    again = losses(tmp_path / "run")
    assert [*again] == [*range(1, 13)] and lost[7] == again[7]
    assert [attempt["from_step"] for attempt in began(tmp_path / "run")] == [0, 6]


OF_THE_USER = {
    "a weight without copy_to_tp": (
        ["model.block=tests.diagnostics.flips:OneSided", "parallel.tensor=2"],
        [
            r"weights or optimizer state \(block\S*0\S*scale",
            "copy_to_tp",
            "model.block=tests.diagnostics.flips:OneSided",
        ],
    ),
    "weights that change in the forward pass": (
        ["model.block=tests.diagnostics.flips:Wandering"],
        ["changed between two updates", "change weights and optimizer state only in the optimizer's step"],
    ),
    "random numbers of its own": (
        ["model.block=tests.diagnostics.flips:Drawing"],
        ["computed twice, had two different losses", "not on random numbers"],
    ),
    "a schedule that differs": (
        ["optim.schedule=tests.diagnostics.flips:rate_of_rank"],
        [
            r"same weights or optimizer state \(\S+",
            "make the update independent of the rank",
            "optim.schedule=tests",
        ],
    ),
    "an engine that differs": (
        ["engine.name=tests.diagnostics.flips:OwnEngine"],
        ["make the update independent of the rank", "engine.name=tests.diagnostics.flips:OwnEngine"],
    ),
}


SAMPLE = "a weight without copy_to_tp", "a schedule that differs"


@pytest.mark.parametrize(
    "words, said",
    [
        pytest.param(*case, id=name, marks=[pytest.mark.whole] * (name not in SAMPLE))
        for name, case in OF_THE_USER.items()
    ],
)
def test_a_fault_of_the_users_own_code_is_named_as_such_and_excludes_no_node(words, said, tiny, tmp_path):
    more = ["checkpoint.every=2", "batch.micro_size=2", "cluster.preflight=false", "cluster.verify_every=2", *words]
    with Ranks(2, tiny("run", *more), PYTHONPATH=ROOT) as processes:
        ended = processes.wait()
    assert {code for code, _ in ended.values()} == {93}, ended
    log = (tmp_path / "run/log.txt").read_text()
    for text in said:
        assert re.search(text, log), log
    assert "corruption" not in log and "so hpclm blames that code and excludes no node" in log
    assert not of_kind(tmp_path / "run", "corrupt")


def test_a_bit_that_flips_where_code_of_the_user_takes_part_counts_as_the_programs_fault(run, tmp_path):
    codes, log = run("optim.schedule=tests.diagnostics.flips:constant_rate")
    assert codes == {93} and "rank 1 on " in log and "hpclm resume" in log, log
    assert not of_kind(tmp_path / "run", "corrupt")


def test_bad_nodes_of_all_runs_are_excluded_with_and_without_a_preflight_report(tmp_path):
    note(tmp_path, "corrupt", bad=["node3"], step=8)
    note(tmp_path, "corrupt", bad=[])
    assert bad_nodes([str(tmp_path)]) == ["node3"]
    note(tmp_path, "preflight", bad=["node9"])
    note(tmp_path, "preflight", bad=["node1"])
    assert bad_nodes([str(tmp_path)]) == ["node1", "node3"]
    (tmp_path / "other").mkdir()
    note(tmp_path / "other", "preflight", bad=["node2"])
    assert bad_nodes([str(tmp_path), str(tmp_path / "other")]) == ["node1", "node3", "node2"]
    note(tmp_path, "corrupt", bad=["-node3"])
    with pytest.raises(ConfigError, match="'-node3', which is not a node name"):
        bad_nodes([str(tmp_path)])


def finding(**more):
    return corruption.CorruptionFinding((0,), "its weights changed", **{"advice": "check your block", **more})


@pytest.mark.parametrize("certain, saved", [(True, 5), (False, 0)])
def test_a_run_that_ends_because_of_corruption_notes_the_node_and_says_how_to_exclude_it(certain, saved, tmp_path):
    with pytest.raises(CorruptedError) as ended:
        corruption.end_run([finding(certain=certain)], 7, saved, single(), torch.device("cpu"), tmp_path)
    [row] = of_kind(tmp_path, "corrupt")
    [node] = row["bad"]
    way = "The run resumes from step 5, which was good when it was saved" if saved else "Nothing was saved"
    assert row["step"] == 7 and str(ended.value) == (
        f"{row['text']}. {way}; to exclude {node}: hpclm resume {tmp_path} --exclude-bad {tmp_path}"
    )
    assert row["text"].startswith(
        f"silent corruption detected after step 7: {'' if certain else 'one of '}{single().ranks[0]}, "
    )
    assert row["text"].endswith(": its weights changed") and bad_nodes([str(tmp_path)]) == [node]


@pytest.mark.parametrize(
    "saved, way",
    [(5, "resumes from step 5, which was good when it was saved"), (0, "starts from the beginning: nothing was saved")],
)
def test_code_of_the_user_is_named_with_what_to_change_and_no_node(saved, way):
    with pytest.raises(DivergedError) as ended:
        corruption.blame_program([finding(), finding()], 7, saved, ["model.block=my:B", "optim.name=my:O"], single())
    said = str(ended.value)
    assert said.startswith("state that must be equal differs after step 7: ") and said.count("check your block") == 1
    assert "takes part in training (model.block=my:B, optim.name=my:O), so hpclm blames that code" in said
    assert said.endswith(f"To fix it, check your block. Then hpclm resume: the run {way}") and ended.value.shared


def test_a_finding_names_some_ranks_and_weights_and_how_many_more_there_are():
    few = finding(weights=("a", "b")).described(["rank 0"])
    assert few == "rank 0: its weights changed (a, b)"
    most = corruption.MAX_NAMED
    names = [f"w{n}" for n in range(most + 2)]
    many = corruption.CorruptionFinding(tuple(range(most + 1)), "x", weights=tuple(names)).described(names)
    assert many == f"{'; '.join(names[:most])}; 1 more: x ({', '.join(names[:most])}, 2 more)"


def test_what_cannot_be_checked_has_no_verifier(caplog):
    assert corruption.verifier(None, None, single(), 0) is None and not caplog.messages
    assert corruption.verifier(object(), None, single(), 5) is None
    assert caplog.messages == [
        "cluster.verify_every: an engine that is not derived from BaseEngine is not checked for corruption"
    ]
