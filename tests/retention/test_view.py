"""What a pass sees of a run is complete, or it deletes nothing (race 33)."""

from __future__ import annotations

import msgspec
import pytest

from cachefs.errors import CachefsError, CorruptError, DeniedError, UnavailableError
from tests.retention.world import DAY, World, deletes, hide
from tests.store.faults import Rule, denied, ends, throttled
from tests.store.faults import rules as faults


async def test_a_hidden_pointer_halts(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    hide(world, world.keys.pointer(world.run))
    with pytest.raises(CorruptError, match="existed and is gone"):
        await world.collect()
    assert deletes(world.store) == 0


def _newer(world: World, attempt: str) -> None:
    """Give the manifest of a generation bytes of a later format."""
    key = world.keys.manifest(world.run, attempt, opened=1, sealed=1)
    version = world.inner._versions[key][0]
    body = version.body.replace(b'"format":1', b'"format":2')
    world.inner._versions[key][0] = msgspec.structs.replace(version, body=body)


@pytest.mark.parametrize(
    ("rule", "error", "names"),
    [
        (Rule("get", throttled, key=ends("pointer.json"), nth=0), UnavailableError, "the pointer of run"),
        (Rule("get", denied, key=ends("pointer.json"), nth=3), DeniedError, "the history of run"),
        (Rule("get", throttled, key=ends("manifest.json"), nth=0), UnavailableError, "the manifest of step-"),
        (Rule("get", denied, key=ends("manifest.json"), nth=2), DeniedError, "the manifest of step-"),
        (Rule("list_versions", throttled, key=ends("attempts/"), nth=0), UnavailableError, "the list of attempts"),
        (Rule("list_versions", denied, key=ends("leases/"), nth=2), DeniedError, "the list of leases"),
        (Rule("list_multiparts", denied), DeniedError, "the list of attempts"),
        (Rule("get", denied, key=lambda key: "/leases/" in key), DeniedError, "the lease "),
    ],
    ids=[
        "pointer", "history", "manifests", "one manifest", "attempts", "leases after the swap", "uploads", "one lease",
    ],
)  # fmt: skip
async def test_what_cannot_be_read_stops_the_pass(
    world: World, rule: Rule, error: type[CachefsError], names: str
) -> None:
    world.saves(1, 2, 3, 4)
    world.wait(DAY)
    world.lease("t9")
    before = world.objects("attempts/")
    with pytest.raises(error, match=names):
        await world.collect(plan=faults(rule))
    there = {key for key, _ in before}
    assert not [call for call in world.store.calls if call.operation == "delete_version" and call.key in there]
    assert world.objects("attempts/") == before
    world.store.plan = faults()
    assert (await world.collect()).deleted == 8


async def test_a_listing_that_ends_after_a_page_stops_the_pass(world: World) -> None:
    """A store that yields some entries and fails then, as S3 does with the second page."""
    world.saves(1, 2, 3, 4)
    world.wait(DAY)

    def second_page(request):
        def pages():
            yield from list(request())[:3]
            raise UnavailableError("503 on page 2")

        return pages()

    # The double of the store makes a listing whole before it hands it out; S3 does not.
    world.store.list_versions = lambda prefix: (
        second_page(lambda: world.inner.list_versions(prefix))
        if prefix.endswith("attempts/")
        else world.inner.list_versions(prefix)
    )
    with pytest.raises(UnavailableError, match="the list of attempts of run 'exp/a': 503 on page 2"):
        await world.collect()
    assert deletes(world.store) == 0


@pytest.mark.parametrize("which", [0, 1, 2, 3])
async def test_a_manifest_of_a_later_format_stops_the_pass(world: World, which: int) -> None:
    attempts = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    _newer(world, attempts[which])
    with pytest.raises(CorruptError, match=f"the manifest of step-{which + 1}"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_manifest_of_an_open_attempt_that_cannot_be_read_stops_the_pass(world: World) -> None:
    world.saves(1, 2, 3)
    attempt = world.open(9)
    world.seal(9, attempt)
    _newer(world, attempt)
    world.wait(DAY)
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_history_that_is_damaged_stops_the_pass(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    key = world.keys.pointer(world.run)
    old = world.inner._versions[key][1]
    world.inner._versions[key][1] = msgspec.structs.replace(old, body=b"{}")
    with pytest.raises(CorruptError, match="the history of run"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_lease_of_a_later_format_stops_the_pass(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    world.inner.put(world.keys.lease(world.run, "x"), b'{"format":2}\n', condition=None)
    with pytest.raises(CorruptError, match="is not a valid Lease"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_history_that_a_lifecycle_rule_has_cut_off_keeps_what_it_named(world: World) -> None:
    attempts = world.saves(1, 2, 3, 4)
    key = world.keys.pointer(world.run)
    for version in list(world.inner._versions[key])[:4]:
        world.inner.delete_version(key, version.version_id)
    world.wait(DAY)
    done = await world.collect()
    assert done.retired == (attempts[1],)
    assert [one.attempt for one in done.plan.unknown] == [attempts[0]]
    assert attempts[0] in world.attempts()
