"""Pages: references, pins and copies, and that every misuse is seen."""

from __future__ import annotations

import pytest

from glm5.serve.pages import Copy, PageError, PagePool, Tier
from glm5.utils.errors import ConfigError


def test_a_page_is_free_when_its_last_holder_is_gone() -> None:
    tier = Tier(3, "device")
    assert tier.allocate(2) == [0, 1]
    tier.share(0)
    tier.release(0)
    assert (tier.free, tier.refs) == (1, [1, 1, 0])
    tier.release(0)
    assert tier.free == 2
    assert tier.allocate(2) == [0, 2]  # the one last freed first
    tier.check()


def test_a_pinned_page_is_not_given_out_before_the_peer_has_acknowledged() -> None:
    tier = Tier(1, "device")
    tier.allocate(1)
    tier.pin(0)
    tier.pin(0)
    tier.release(0)
    tier.unpin(0)
    assert tier.free == 0
    with pytest.raises(PageError, match="1 pages wanted, 0 free"):
        tier.allocate(1)
    with pytest.raises(PageError, match="nobody holds it"):  # pinned, but not to be used any more
        tier.share(0)
    tier.check()
    tier.unpin(0)
    assert tier.allocate(1) == [0]
    with pytest.raises(PageError, match="is not pinned"):
        tier.unpin(0)


def test_idle_pages_are_those_that_only_the_tree_holds() -> None:
    tier = Tier(2, "device")
    tier.allocate(2)
    tier.cache(0)
    assert tier.idle == 0
    tier.release(0)
    assert tier.idle == 1
    tier.pin(0)
    assert tier.idle == 0
    tier.unpin(0)
    tier.share(0)
    assert tier.idle == 0
    tier.release(0)
    tier.check()
    with pytest.raises(PageError, match="the tree's reference"):
        tier.release(0)
    tier.uncache(0)
    assert (tier.idle, tier.free) == (0, 1)
    tier.check()


@pytest.mark.parametrize("misuse", ["release", "share", "pin", "unpin", "cache", "uncache"])
@pytest.mark.parametrize("page", [0, 1, 2, -1])
def test_a_page_without_holder_cannot_be_used(misuse: str, page: int) -> None:
    tier = Tier(2, "device")
    tier.release(tier.allocate(1)[0])
    with pytest.raises(PageError):
        getattr(tier, misuse)(page)
    tier.check()


def test_the_tree_holds_a_page_once() -> None:
    tier = Tier(2, "device")
    tier.allocate(2)
    tier.cache(0)
    with pytest.raises(PageError, match="in the tree already"):
        tier.cache(0)
    with pytest.raises(PageError, match="not in the tree"):
        tier.uncache(1)


def test_copies_come_in_the_order_in_which_they_were_ordered() -> None:
    pool = PagePool(3, 1)
    first, second, third = pool.device.allocate(3)
    slot = pool.offload(first)
    pool.duplicate(second, first)
    pool.restore(slot, third)
    wanted = (Copy("to_host", 0, 0), Copy("within", 1, 0), Copy("to_device", 0, 2))
    assert pool.take_copies() == wanted
    assert pool.take_copies() == ()
    with pytest.raises(PageError, match="host: 1 pages wanted"):
        pool.offload(first)


def test_pages_for_rounds_up() -> None:
    pool = PagePool(1)
    assert [pool.pages_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize(("field", "arguments"), [("pages", (0,)), ("host_pages", (1, -1)), ("page_size", (1, 0, 0))])
def test_impossible_sizes_are_refused(field: str, arguments: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=field):
        PagePool(*arguments[:2], page_size=arguments[2] if len(arguments) > 2 else 64)


@pytest.mark.parametrize("damage", ["refs", "free", "idle", "cached"])
def test_check_sees_damage(damage: str) -> None:
    pool = PagePool(3)
    pool.device.allocate(1)
    pool.check()
    if damage == "refs":
        pool.device.refs[0] = 0
    elif damage == "free":
        pool.device._free.append(2)
    elif damage == "idle":
        pool.device.idle += 1
    else:
        pool.device.cached[2] = True
    with pytest.raises(PageError):
        pool.check()
