import pytest
import torch

from exl3_triton.ops.routes import max_blocks, pack_routes


def expected(ids, num_experts, block_m):
    """[(expert, routes of the block)], experts and routes ascending."""
    flat = ids.flatten().tolist()
    blocks = []
    for e in range(num_experts):
        routes = [route for route, expert in enumerate(flat) if expert == e]
        blocks += [(e, routes[start : start + block_m]) for start in range(0, len(routes), block_m)]
    return blocks


def packed_blocks(ids, num_experts, block_m):
    packed, block_expert, block_rows, num_blocks = (t.tolist() for t in pack_routes(ids, num_experts, block_m))
    assert len(block_expert) == max_blocks(ids.numel(), num_experts, block_m)
    starts = [block * block_m for block in range(num_blocks[0])]
    return [(block_expert[i], packed[start : start + block_rows[i]]) for i, start in enumerate(starts)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "block_m"),
    [(0, 2, 4, 16), (1, 2, 8, 16), (17, 2, 8, 8), (40, 4, 6, 8), (300, 2, 5, 48)],
)
def test_pack_routes(tokens, top_k, num_experts, block_m, dtype, device, triton_backend):
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k), dtype=dtype, device=device)
    assert packed_blocks(ids, num_experts, block_m) == expected(ids, num_experts, block_m)


def test_pack_routes_ignores_every_illegal_id(device, triton_backend):
    ids = torch.tensor([[-1, 3], [2**40, 1], [-(2**40), 4], [1, 2**31]], device=device)
    assert packed_blocks(ids, 4, 8) == [(1, [3, 6]), (3, [1])]
    assert packed_blocks(torch.full((9, 2), -1, device=device), 4, 8) == []


def test_pack_routes_of_one_expert_that_takes_all(device, triton_backend):
    ids = torch.full((129 * 9, 1), 2, dtype=torch.int32, device=device)  # more than 128 blocks: the block list takes two steps
    assert packed_blocks(ids, 3, 8) == expected(ids, 3, 8)


@pytest.mark.parametrize("block_m", [8, 48, 64])
def test_max_blocks_bounds_every_assignment(block_m):
    for counts in ([1] * 7, [block_m + 1] * 7, [0, 0, 5], [block_m] * 3, [3 * block_m + 1, 0, 1]):
        assert sum(-(-count // block_m) for count in counts) <= max_blocks(sum(counts), len(counts), block_m)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "num_experts", "block_m"), [(32, 256, 8), (3072, 256, 64), (5000, 160, 128)])
def test_pack_routes_at_size(tokens, num_experts, block_m):
    ids = torch.rand(tokens, num_experts, device="cuda").topk(8).indices
    assert packed_blocks(ids, num_experts, block_m) == expected(ids, num_experts, block_m)
