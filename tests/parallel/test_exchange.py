"""Hierarchical all-to-all: equal to the flat one, with gradients, and with fewer messages between hosts."""

import pytest
import torch
import torch.distributed as dist

from glm5.parallel.exchange import HeadExchange, Hierarchy, all_to_all, hierarchical_all_to_all
from glm5.utils.errors import ConfigError
from support.ranks import run_ranks


def _whole(batch, length, heads, width, seed):
    return torch.randn(batch, length, heads, width, generator=torch.Generator().manual_seed(seed))


def _on_four_ranks(place):
    rank, world = place.rank, place.size
    # All sizes of hosts that four ranks allow, with uneven trailing shapes.
    for per_host in (1, 2, 4):
        hierarchy = Hierarchy.build(range(world), per_host)
        assert (hierarchy.per_host, hierarchy.hosts) == (per_host, world // per_host)
        for shape in ((3,), (2, 5), (0, 4)):
            generator = torch.Generator().manual_seed(rank)
            send = torch.randn(world, *shape, generator=generator).requires_grad_()
            flat_send = send.detach().clone().requires_grad_()
            flat = all_to_all(flat_send, hierarchy.all)
            mine = hierarchical_all_to_all(send, hierarchy)
            assert torch.equal(mine, flat)
            weight = torch.randn(mine.shape, generator=generator)
            (mine * weight).sum().backward()
            (flat * weight).sum().backward()
            assert torch.equal(send.grad, flat_send.grad)
            for source in range(world):
                theirs = torch.randn(world, *shape, generator=torch.Generator().manual_seed(source))
                assert torch.equal(mine[source], theirs[rank])

        # Queries of eight heads and a latent of one "head" a rank: out to heads, and back.
        whole = [_whole(2, 4 * world, 8, 6, 1), _whole(2, 4 * world, 4, 3, 2)]
        local = [x[:, 4 * rank : 4 * rank + 4].clone().requires_grad_() for x in whole]
        exchange = HeadExchange(hierarchy)
        by_heads = exchange.to_heads(*local)
        for x, y in zip(whole, by_heads, strict=True):
            h = x.shape[2] // world
            assert torch.equal(y, x[:, :, h * rank : h * rank + h])
        back = exchange.to_positions(*by_heads)
        assert all(torch.equal(a, b) for a, b in zip(local, back, strict=True))
        sum((y * (i + 1 + rank)).sum() for i, y in enumerate(by_heads)).backward()
        for i, x in enumerate(local):
            h = x.shape[2] // world
            factor = torch.arange(world).repeat_interleave(h) + i + 1.0  # the rank that holds each head
            assert torch.equal(x.grad, factor[:, None].expand_as(x))
        with pytest.raises(ConfigError, match="heads=6"):
            exchange.to_heads(_whole(1, 2, 6, 2, 0))

    # A hierarchy of some ranks only; the others take part in making groups, and get none.
    assert (Hierarchy.build([1, 3], 1) is None) == (rank in (0, 2))
    with pytest.raises(ConfigError, match="per_host=3"):
        Hierarchy.build(range(world), 3)
    return _messages_between_hosts(world)


def _messages_between_hosts(world):
    """What the two forms send from this rank to other hosts of two: (messages, elements) of each."""
    hierarchy = Hierarchy.build(range(world), 2)
    host = dist.get_rank() // 2
    sent = []
    original = dist.all_to_all_single

    def counted(output, send, **options):
        ranks = dist.get_process_group_ranks(options["group"])
        sent.extend(send.numel() // len(ranks) for r in ranks if r // 2 != host)
        return original(output, send, **options)

    dist.all_to_all_single = counted
    try:
        counts = []
        for move in (lambda x: all_to_all(x, hierarchy.all), lambda x: hierarchical_all_to_all(x, hierarchy)):
            sent.clear()
            move(torch.zeros(world, 5))
            counts.append((len(sent), sum(sent)))
    finally:
        dist.all_to_all_single = original
    return counts


def test_four_ranks_on_hosts_of_one_two_and_four():
    for flat, nested in run_ranks(4, "cp=4", _on_four_ranks):
        assert flat == (2, 10)  # a message to each of the two ranks of the other host
        assert nested == (1, 10)  # one of twice the size
