"""Tables of launch parameters: what is read, refused, written at once by many, and that a look-up is a pure function."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from exl3_triton import tables
from exl3_triton.format import Codebook
from exl3_triton.kv_format import KV_FORMATS
from exl3_triton.ops.attention_tuning import (
    DecodeTile,
    GroupedTile,
    ScoreTile,
    SplitPlan,
    _from_table,
    grouped_prefill_tile,
    prefill_tile,
    score_tile,
    select_decode,
    select_grouped_decode,
    select_grouped_prefill,
    select_prefill,
    select_scores,
)
from exl3_triton.ops.tuning import Device, LinearConfig, _configure, select_linear
from exl3_triton.plan import DispatchPolicy, MoeSpec, _tuned, plan_moe
from exl3_triton.tables import Entry, Table, TableError

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = {"block_m": 16, "block_k": 64, "split": 6, "num_warps": 8, "registers": None, "prefetch": True}
MEASURED = {"source": "measured", "us": {"1": 10.0}, "date": "2026-12-01", "torch": "2", "triton": "3", "driver": "5"}
KEY = (6144, 1024, "mcg", 3.0, 16)
CARD = Device("cuda", 100, "Test Card", (12, 9))
GLM = MoeSpec(6144, 512, 256, 8, rates=(3,), codebooks=(Codebook.MCG,))
EXPERTS = {"block_m": 16, "split": 4, "down_split": 2, "block_k": 64, "warps": 4, "registers": 80, "small": 0, "prefetch": 0}


def table(entries, op="linear", device="Test Card", capability=(12, 9), processors=100):
    return Table(op, device, capability, processors, {key: Entry(config, MEASURED) for key, config in entries.items()})


@pytest.fixture
def places(tmp_path, monkeypatch):
    """(shipped, user's) folders of this test alone."""
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "user"))
    forget = (tables.entries_for, _configure, _tuned, _from_table)
    for function in forget:
        function.cache_clear()
    yield tmp_path / "shipped", tmp_path / "user"
    for function in forget:
        function.cache_clear()


def test_a_table_reads_back_as_it_was_written(tmp_path):
    written = table({KEY: CONFIG, (128, 128, "mul1", 2.5, 255): CONFIG | {"block_m": 128, "block_k": 32, "split": 1}})
    path = tables.save(tmp_path, written)
    assert path == tmp_path / "linear" / "Test_Card.json"
    assert tables.load(path, "linear") == written
    assert tables.dumps(tables.load(path, "linear")) == path.read_text()
    assert len(path.read_text().splitlines()) == 4  # an entry a line
    before = path.stat().st_mtime_ns
    tables.save(tmp_path, table({KEY: CONFIG}))
    assert path.stat().st_mtime_ns == before  # nothing new: nothing written
    tables.save(tmp_path, table({KEY: CONFIG | {"split": 3}}))
    assert tables.load(path, "linear").entries[KEY].config["split"] == 3
    assert len(tables.load(path, "linear").entries) == 2


def damage(change):
    def write(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return write


def config(**changes):
    return damage(lambda content: content["entries"][0]["config"].update(changes))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_text(path.read_text()[:-20]), "JSONDecodeError"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00" + path.read_bytes()), "UnicodeDecodeError"),
        (lambda path: path.write_text(""), "JSONDecodeError"),
        (lambda path: path.write_text("[]"), "schema number"),
        (damage(lambda content: content.update(schema=2)), "schema 2: this version reads schema 1"),
        (damage(lambda content: content.update(op="moe")), "required 'linear'"),
        (damage(lambda content: content.update(entries={"a": 1})), "TypeError"),
        (damage(lambda content: content.pop("processors")), "processors"),
        (damage(lambda content: content["entries"].append(content["entries"][0])), "two entries"),
        (damage(lambda content: content["entries"][0].pop("rows")), "rows"),
        (damage(lambda content: content["entries"][0].update(k=-6144)), "k=-6144: required a positive number"),
        (damage(lambda content: content["entries"][0].update(codebook="mgc")), "codebook"),
        (damage(lambda content: content["entries"][0].update(rows=17)), "rows of 16, 32, 64, 255"),
        (config(block_m=24), "block_m=24"),
        (config(split=0), "split=0"),
        (config(split=97), "97 parts"),
        (config(num_warps=True), "num_warps=True"),
        (config(prefetch=1), "prefetch=1"),
        (config(even=17, split=1), "even=17"),
        (config(even=3), "split of 1 with even=3"),
        (config(stages=0), "stages=0"),
        (config(registers=300), "registers=300"),
        (config(block_n=64), "block_n"),
        (damage(lambda content: content["entries"][0]["evidence"].pop("driver")), "driver"),
        (damage(lambda content: content["entries"][0]["evidence"].update(source="heard")), "heard"),
        (damage(lambda content: content["entries"][0]["evidence"].update(us={"1": -1})), "positive times"),
    ],
)
def test_a_damaged_table_is_refused_by_name(places, harm, message):
    path = tables.save(places[1], table({KEY: CONFIG}))
    harm(path)
    with pytest.raises(TableError, match=message) as refused:
        select_linear(1, 6144, 8, CARD)
    assert str(path) in str(refused.value)
    with pytest.raises(TableError, match="Test_Card"):
        tables.save(places[1], table({KEY: CONFIG}))  # and not overwritten


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (64, {"split": 2}, "split and down_split of 1"),
        (64, {"split": 1, "down_split": 1, "small": 64}, "small=64"),
        (32, {"block_m": 48, "prefetch": 1}, "block_m=48"),
        (32, {"block_m": 24}, "block_m=24"),
        (48, {}, "rows of 32, 64"),
    ],
)
def test_experts_refuse_what_their_kernels_cannot_run(tmp_path, rows, changes, message):
    path = tables.save(tmp_path, table({(4, 128, 128, 2, "mcg", 3.0, rows): EXPERTS | changes}, op="moe"))
    with pytest.raises(TableError, match=message):
        tables.load(path, "moe")


MLA = ("mla_decode", 16, 1, 576, 512, "fp8", 64)
TILE = {"rows": 32, "keys": 16, "warps": 8, "stages": 2, "parts": 1, "words": True, "most": 7}
SCORES = {"keys": 32, "span": 256, "warps": 8, "stages": 3}


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ((*MLA[:-1], 32), {}, "rows of 64, 8192"),
        ((*MLA[:-2], "bf16", 64), {}, "words=True: not possible with mla_decode of bf16"),
        (MLA, {"parts": 2}, "parts=2"),
        (MLA, {"keys": 128}, "keys=128"),
        (MLA, {"most": 0}, "most=0"),
        (MLA, {"words": 1}, "words=1"),
        (("mla_prefill", 16, 16, 256, 256, "bf16", 8192), {"words": False}, "most=7: not possible with mla_prefill"),
        (("gqa_prefill", 96, 8, 128, 128, "bf16", 64), {"words": False, "most": 0}, "rows=64"),
        (("gqa_decode", 96, 8, 128, 128, "nvfp4", 64), {"words": False}, "kv=nvfp4"),
        (("mha", *MLA[1:]), {}, "kind='mha': required one of mla_decode"),
        (("mla_decode", 0, *MLA[2:]), {}, "heads=0: required a positive number"),
    ],
)
def test_attention_refuses_what_its_kernels_cannot_run(tmp_path, key, changes, message):
    path = tables.save(tmp_path, table({key: TILE | changes}, op="attention"))
    with pytest.raises(TableError, match=message):
        tables.load(path, "attention")


def test_attention_and_indexer_take_their_entries(places):
    """For 16-bit data and the range of rows that they were written for; elsewhere the rules."""
    prefill = {**TILE, "words": False, "most": 0}
    few = {
        MLA: TILE,
        ("mla_sparse_decode", *MLA[1:-1], 8192): TILE | {"rows": 16},
        ("mla_prefill", 16, 16, 256, 256, "bf16", 8192): prefill,
        ("gqa_decode", 96, 8, 128, 128, "fp8", 64): TILE | {"words": False},
        ("gqa_prefill", 96, 8, 128, 128, "bf16", 8192): prefill,
    }
    tables.save(places[1], table(few, op="attention"))
    tables.save(places[1], table({(32, 128, "fp8", 8192): SCORES}, op="indexer"))
    half, grouped = torch.bfloat16, (96, 8, 128, 128)

    def decode(dtype=half, device=CARD, kv="fp8", tokens=64, *, sparse=False):
        return select_decode(16, 512, 64, dtype, device, kv, tokens, 300, sparse=sparse)

    tile = DecodeTile(32, 16, 8, 2, words=True)
    assert decode() == (tile, SplitPlan(128, 7, 3))
    assert decode(tokens=1) == decode()
    assert decode(sparse=True, tokens=65) == (tile._replace(heads=16), SplitPlan(64, 7, 5))
    for options in ({"dtype": torch.float32}, {"kv": "bf16"}, {"tokens": 65}, {"sparse": True}):
        assert decode(**options) == decode(**options, device=CARD._replace(name=""))
    assert select_prefill(16, 256, 256, half, CARD) == (32, 16, 8, 2)
    assert select_prefill(8, 256, 256, half, CARD) == prefill_tile(half, 512, CARD)
    assert select_grouped_decode(grouped, half, CARD, "fp8", 3, 300) == (GroupedTile(32, 16, 8, 2), SplitPlan(128, 7, 3))
    assert select_grouped_prefill(grouped, half, CARD, "bf16") == GroupedTile(32, 16, 8, 2)
    assert select_grouped_prefill(grouped, half, CARD, "fp8") == grouped_prefill_tile(half, 128, CARD, fp8=True)
    assert select_scores(32, 128, half, CARD, "fp8") == ScoreTile(**SCORES)
    assert select_scores(32, 128, half, CARD, "bf16") == score_tile(half)


def test_formats_are_those_of_the_caches():
    assert tables.KV_FORMATS == KV_FORMATS


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError, match=r"cannot be written.*EXL3_TRITON_TUNED_DIR"):
        tables.save(tmp_path / "file", table({KEY: CONFIG}))


def test_user_entries_go_before_shipped_ones_and_those_before_the_rules(places):
    shipped, user = places
    rule = select_linear(1, 6144, 8, CARD)
    assert rule == select_linear(1, 6144, 8, CARD._replace(name=""))
    tables.entries_for.cache_clear()
    _configure.cache_clear()
    tables.save(shipped, table({KEY: CONFIG, (6144, 2048, "mcg", 3.0, 16): CONFIG}))
    tables.save(user, table({KEY: CONFIG | {"split": 12}}))
    assert select_linear(1, 6144, 8, CARD) == LinearConfig(**CONFIG | {"split": 12})
    assert select_linear(1, 6144, 16, CARD) == LinearConfig(**CONFIG)
    # a row gives the same bits in any batch of its range, so all row counts of a range share the entry
    assert {select_linear(m, 6144, 8, CARD) for m in range(1, 17)} == {LinearConfig(**CONFIG | {"split": 12})}
    for other in ((17, 6144, 8, CARD, 6, 1), (1, 6144, 8, CARD, 8, 1), (1, 6144, 8, CARD, 6, 2), (1, 3072, 8, CARD, 6, 1)):
        assert select_linear(*other) == select_linear(*other[:3], CARD._replace(name=""), *other[4:])
    assert select_linear(256, 6144, 8, CARD) is None


def test_devices_find_their_table_by_name_variant_or_capability(places):
    shipped, user = places
    tables.save(shipped, table({KEY: CONFIG}))
    tables.save(shipped, table({KEY: CONFIG | {"split": 8}}, device="Test Card Pro"))
    tables.save(shipped, table({KEY: CONFIG | {"split": 9}}, device="Small Card", processors=20))
    tables.save(user, table({KEY: CONFIG | {"split": 10}}, device="Elsewhere"))
    split = lambda **changes: select_linear(1, 6144, 8, CARD._replace(**changes)).split
    assert split() == 6
    assert split(name="Test Card Workstation Edition") == 6
    assert split(name="Test Card Pro Max") == 8
    assert split(name="Test Cardigan") == 6  # no variant, but of the same compute capability
    assert split(name="Unknown", processors=20) == 9  # the nearest of its capability
    assert split(name="Unknown", processors=200) == 12  # twice the multiprocessors, twice the parts
    assert split(name="Unknown", processors=70) == 4
    unknown = CARD._replace(name="Unknown", capability=(8, 0))
    assert select_linear(1, 6144, 8, unknown) == select_linear(1, 6144, 8, unknown._replace(name=""))


def test_a_look_up_reads_files_once(places, monkeypatch):
    path = tables.save(places[0], table({KEY: CONFIG}))
    first = select_linear(1, 6144, 8, CARD)
    path.write_text("gone")

    def refuse(*args, **kwargs):
        raise AssertionError("a file was read")

    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    monkeypatch.setattr(pathlib.Path, "glob", refuse)
    assert select_linear(1, 6144, 8, CARD) == first == LinearConfig(**CONFIG)
    assert select_linear(40, 6144, 24, CARD) is not None  # a problem that was not asked for before


def test_blocks_of_a_plan_come_from_the_table_and_the_policy_wins(places):
    base = (256, 6144, 512, 8, "mcg", 3.0)
    wide = EXPERTS | {"split": 1, "down_split": 1, "block_m": 32}
    rows = {32: EXPERTS, 64: wide, 128: wide, 256: wide, 512: wide | {"block_m": 64}, 1024: wide | {"block_m": 128}}
    tables.save(places[0], table({(*base, r): config for r, config in rows.items()}, op="moe"))
    policy = DispatchPolicy()
    plan = plan_moe(GLM, max_tokens=4096, policy=policy, device=CARD)
    found = [(r.rows, r.block_m, r.split, r.block_k, r.registers, r.sequential, r.half) for r in plan.regimes]
    assert found[:2] == [(32, 16, 4, 64, 80, 0, 0), (256, 32, 1, 64, 80, 0, 1)]
    assert found[2:4] == [(512, 64, 1, 64, 80, 0, 1), (1024, 128, 1, 64, 80, 0, 1)]
    assert found[4:] == [(2048, 128, 1, 0, 0, 0, 1), (4096, 128, 1, 0, 0, 1, 1)]  # no entries: the rules
    assert plan.replan(64).regimes[1].block_m == 32
    assert plan.schedule == type(plan.schedule).decode_ints(plan.schedule.encode())
    rules = plan_moe(GLM, max_tokens=4096, policy=policy)
    assert [r.block_m for r in rules.regimes] == [8, 16, 32, 64, 128]
    forced = plan_moe(GLM, max_tokens=4096, policy=DispatchPolicy(block_m=8, prefill_block_m=64), device=CARD)
    assert [(r.block_m, r.block_k) for r in forced.regimes] == [(8, 0), (64, 0)]
    other = MoeSpec(6144, 512, 256, 8, rates=(4,), codebooks=(Codebook.MCG,))
    assert plan_moe(other, max_tokens=4096, policy=policy, device=CARD).schedule == rules.schedule


WRITER = """
import pathlib, sys
from exl3_triton.tables import Entry, Table, save
place, number, count, config, evidence = eval(sys.argv[1])
for i in range(count):
    entries = {(6144, 128 * (1 + number * 1000 + i), "mcg", 3.0, 16): Entry(config, evidence)}
    save(pathlib.Path(place), Table("linear", "Test Card", (12, 9), 100, entries))
    print(i, flush=True)
assert "torch" not in sys.modules
"""


def writer(place, number, count):
    arguments = repr((str(place), number, count, CONFIG, MEASURED))
    return subprocess.Popen([sys.executable, "-c", WRITER, arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_eight_processes_write_at_once(tmp_path):
    processes = [writer(tmp_path, number, 6) for number in range(8)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 8
    found = tables.load(tmp_path / "linear" / "Test_Card.json", "linear").entries
    assert {key[1] for key in found} == {128 * (1 + number * 1000 + i) for number in range(8) for i in range(6)}
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_kill_loses_at_most_the_entry_being_written(tmp_path):
    process = writer(tmp_path, 0, 100_000)
    for _ in range(20):
        process.stdout.readline()
    time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    reported = 20 + len(process.stdout.read().splitlines())
    process.wait()
    path = tmp_path / "linear" / "Test_Card.json"
    found = len(tables.load(path, "linear").entries)
    assert reported <= found <= reported + 1
    tables.save(tmp_path, table({(128, *KEY[1:]): CONFIG | {"split": 1}}))  # the lock died with its owner
    assert len(tables.load(path, "linear").entries) == found + 1


def test_shipped_tables_are_whole():
    paths = sorted(tables.SHIPPED.glob("*/*.json"))
    for path in paths:
        found = tables.load(path, path.parent.name)
        assert tables.file_name(found.device) == path.name
        assert path.read_text() == tables.dumps(found)
        assert found.entries
