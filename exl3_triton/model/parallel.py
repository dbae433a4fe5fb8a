"""Tensor parallelism: which part of a model a rank holds.

Sources: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (columns of the first matrix, rows of the second, one sum behind them).
Cuts lie on multiples of 128 features, the width of a rotation block: such a cut through an EXL3 matrix is exact. Blocks that
the ranks do not divide go to the first ranks: 1002 blocks over four are 251, 251, 250, 250.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..format import HADAMARD
from .config import ModelConfig

UNJOINED = "unjoined"  # name of the group of a rank that was built alone, for tests and inspection: it has no partners to run


@dataclass(frozen=True)
class Shard:
    """One of `size` equal partners: rank 0..size-1. Raises ValueError for anything else."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"Shard: found rank {self.rank} of {self.size}, required 0 <= rank < size")

    def part(self, count: int, unit: int = 1) -> range:
        """This rank's share of `count` things in whole units (the last unit may be short); what is left over goes first.

        Empty where there are fewer units than ranks and this one comes late.
        """
        each, over = divmod(-(-count // unit), self.size)
        first = self.rank * each + min(self.rank, over)
        last = first + each + (self.rank < over)
        return range(min(first * unit, count), min(last * unit, count))


@dataclass(frozen=True)
class Partition:
    """What one rank holds of a model, and by which group the ranks add up; made by `Partition.of`.

    heads, kv_heads: of attention; dense, moe, shared: intermediate features of dense MLPs, routed and shared experts; experts:
    routed experts; vocab: rows of the head. A range that is shorter than the whole is a cut. group: name of the process group
    for `ops.all_reduce` and `ops.all_gather`, None for one process.
    """

    shard: Shard
    heads: range
    kv_heads: range
    dense: range
    moe: range
    shared: range
    experts: range
    vocab: range
    group: str | None = None
    whole: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, config: ModelConfig, shard: Shard | None = None, *, expert_parallel: bool = False, group: str | None = None
    ) -> Partition:
        """The same rules for quantized and unquantized checkpoints, whatever a layer holds.

        expert_parallel: divide routed experts by number, not by width. What has fewer blocks of 128 features than there are
        ranks is whole on every rank; `whole` says what and why.
        """
        shard, c = shard or Shard(), config
        whole = []

        def part(what: str, count: int, unit: int = HADAMARD) -> range:
            if shard.size == 1 or count == 0 or -(-count // unit) >= shard.size:
                return shard.part(count, unit)
            whole.append(f"{what} ({-(-count // unit)} x {unit} for {shard.size} ranks)")
            return range(count)

        # groups of heads whose queries, keys, values and outputs all end on blocks; in GQA whole groups of query heads
        queries_each = c.num_heads // c.num_kv_heads if c.num_kv_heads else 1
        widths = (c.head_dim, c.v_head_dim) if c.kv_lora_rank else (c.head_dim, c.v_head_dim, queries_each * c.v_head_dim)
        group_size = math.lcm(*(HADAMARD // math.gcd(width, HADAMARD) for width in widths))
        served = part("attention, heads", c.num_heads // queries_each, group_size)
        moe_width, shared_width = c.moe_intermediate_size, c.moe_intermediate_size * c.num_shared_experts
        sparse = "sparse" in c.layer_kinds
        by_expert = sparse and expert_parallel
        return cls(
            shard=shard,
            heads=range(served.start * queries_each, served.stop * queries_each),
            kv_heads=served if c.num_kv_heads else range(0),
            dense=part("dense MLPs", c.intermediate_size if "dense" in c.layer_kinds else 0),
            moe=part("routed experts", moe_width) if sparse and not by_expert else range(moe_width),
            shared=part("shared experts", shared_width) if sparse else range(shared_width),
            experts=part("routed experts", c.num_experts, 1) if by_expert else range(c.num_experts),
            vocab=part("head", c.vocab_size),
            group=group,
            whole=tuple(whole),
        )

    def local(self, config: ModelConfig) -> ModelConfig:
        """`config` with this rank's heads: what attention and its cache are built from."""
        return replace(config, num_heads=len(self.heads), num_kv_heads=len(self.kv_heads))

    def shared_joins(self, num_experts: int) -> bool:
        """Whether this rank has all routed experts, and the same part of a shared one of their width as of each of them."""
        return self.shared == self.moe and len(self.experts) == num_experts

    def group_of(self, part: range, count: int) -> str | None:
        """The group over which outputs are to be summed: None where `part` is all of `count` and the output complete."""
        return self.group or UNJOINED if len(part) < count else None

    def head_columns(self, vocab_size: int) -> tuple[list[int], str | None]:
        """Every rank's number of columns of the logits, and the group that joins them: None where all have them all."""
        group = self.group_of(self.vocab, vocab_size)
        sizes = [len(Shard(rank, self.shard.size).part(vocab_size, HADAMARD)) for rank in range(self.shard.size)]
        return (sizes, group) if group else ([vocab_size], None)

    def describe(self) -> str:
        """One line on what is divided and what is whole on every rank."""
        whole = ", ".join(("embedding, norms, routers, indexers, latent projections", *self.whole))
        return f"rank {self.shard.rank} of {self.shard.size}: whole on every rank: {whole}"
