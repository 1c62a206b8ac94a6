"""What goes where every process has a disk of its own: what none of them keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt._steps.index import IndexedStep
from ckpt._steps.removal.deletion_plan import DeletionPlan, common_deletions, kept_items

ITEMS = ("a", "b", "c")
# Of every step the items that a disk has, and of those the items that its process keeps.
DISK = st.lists(
    st.sets(st.sampled_from(ITEMS), min_size=1).flatmap(
        lambda has: st.tuples(st.just(has), st.sets(st.sampled_from(sorted(has))))
    ),
    min_size=4,
    max_size=4,
)


@given(st.lists(DISK, min_size=1, max_size=3))
def test_what_one_keeps_stays_on_all_and_the_rest_goes(
    disks: list[list[tuple[set[str], set[str]]]],
) -> None:
    roots = [
        {
            step: IndexedStep(step, str(step), "", 0, 0, None, items=tuple(sorted(has)))
            for step, (has, _) in enumerate(disk)
        }
        for disk in disks
    ]
    own = [
        DeletionPlan(
            {step: root[step] for step, (_, keeps) in enumerate(disk) if not keeps},
            {
                step: dict.fromkeys(has - keeps, "why")
                for step, (has, keeps) in enumerate(disk)
                if has - keeps
            },
            {step: root[step] for step, (has, keeps) in enumerate(disk) if has - keeps},
        )
        for root, disk in zip(roots, disks, strict=True)
    ]
    kept = [kept_items(root, each) for root, each in zip(roots, own, strict=True)]
    for number, each in enumerate(own):
        found = common_deletions(each, kept)
        for step in range(4):
            wanted = set().union(*(disk[step][1] for disk in disks))
            has = disks[number][step][0]
            if not wanted:
                assert step in found.steps
            else:
                assert step not in found.steps
                lost = has - wanted if has & wanted else set()
                assert set(found.losing().get(step, ())) == lost
                assert (step in found.losing()) == (step in found.found and step in found.items)
