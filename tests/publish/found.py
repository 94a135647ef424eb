"""Worlds in which the simulation has found mistakes of the code; each must stay good."""

from __future__ import annotations

from tests.publish.network import Rates
from tests.publish.simulation import Event, Scenario
from tests.publish.training import Save

FOUND: dict[str, Scenario] = {
    "a former owner never learned what became of attempts that it had opened": Scenario(
        saves=(
            Save(generation="last", step=2, writers=(0,), marker=1, gap=20.0, files=1),
            Save(generation="step-2", step=2, writers=(0, 1), marker=0, gap=20.0, files=1),
        ),
        events=(Event(at=34.0, what="owner", node=3, seconds=90.0),),
        rates=Rates(lost=0.0, unheard=0.0, held=0.0, copied=0.0, refused=0.0, slow=0.0, lagging=0.0, crash=0.0),
        members=2,
        named=True,
        promoter=False,
        seed=3,
    ),
    "a refusal of an attempt that its owner still wrote was not read: it stayed open for ever": Scenario(
        saves=(
            Save(generation="last", step=1, writers=(0, 1, 2), marker=1, gap=5.0, files=2),
            Save(generation="step-2", step=2, writers=(0, 1, 2), marker=0, gap=20.0, files=1),
            Save(generation="last", step=3, writers=(0, 1, 2), marker=1, gap=1.0, files=1),
        ),
        events=(
            Event(at=56.0, what="engine", node=2, seconds=90.0),
            Event(at=48.0, what="disk", node=1, seconds=90.0),
            Event(at=9.0, what="disk", node=1, seconds=90.0),
        ),
        rates=Rates(lost=0, unheard=0, held=0, copied=0, refused=0, slow=0, lagging=0, crash=0),
        members=3,
        named=True,
        promoter=False,
        seed=40,
    ),
    "an attempt that was opened for a wish had ended before the member looked again": Scenario(
        saves=(
            Save(generation="last", step=1, writers=(0,), marker=1, gap=0.0, files=2),
            Save(generation="step-4", step=4, writers=(0, 1), marker=1, gap=20.0, files=2),
            Save(generation="last", step=3, writers=(0,), marker=0, gap=1.0, files=1),
            Save(generation="step-1", step=1, writers=(0, 1), marker=0, gap=1.0, files=1),
            Save(generation="step-4", step=4, writers=(0, 1), marker=1, gap=20.0, files=1),
            Save(generation="last", step=6, writers=(0,), marker=1, gap=0.0, files=1),
        ),
        events=(),
        rates=Rates(lost=0, unheard=0.01, held=0.01, copied=0, refused=0.01, slow=0.01, lagging=0, crash=0.01),
        members=2,
        named=True,
        promoter=False,
        seed=717,
    ),
    "a save of the owner and a wish for the same one became two attempts": Scenario(
        saves=(
            Save(generation="step-1", step=1, writers=(0, 1, 2, 3), marker=3, gap=0.0, files=2),
            Save(generation="last", step=2, writers=(0, 1, 2, 3), marker=0, gap=20.0, files=2),
            Save(generation="last", step=3, writers=(0, 1, 2, 3), marker=3, gap=20.0, files=1),
            Save(generation="step-1", step=1, writers=(0, 1, 2, 3), marker=2, gap=0.0, files=2),
            Save(generation="last", step=5, writers=(0, 1, 2, 3), marker=2, gap=20.0, files=2),
        ),
        events=(),
        rates=Rates(lost=0, unheard=0, held=0, copied=0.03, refused=0.03, slow=0.03, lagging=0, crash=0.02),
        members=4,
        named=False,
        promoter=False,
        seed=2022,
    ),
    "an attempt was found while one save waited, and was joined with the next one after a restart": Scenario(
        saves=(
            Save(generation="step-1", step=1, writers=(0, 1, 2), marker=1, gap=5.0, files=2),
            Save(generation="last", step=2, writers=(0, 1, 2), marker=1, gap=1.0, files=2),
            Save(generation="last", step=3, writers=(0, 1, 2), marker=2, gap=20.0, files=2),
        ),
        events=(
            Event(at=13.0, what="node", node=2, seconds=20.0),
            Event(at=54.0, what="disk", node=2, seconds=3.0),
            Event(at=15.0, what="engine", node=0, seconds=90.0),
            Event(at=50.0, what="engine", node=4, seconds=20.0),
        ),
        rates=Rates(lost=0.08, unheard=0, held=0.08, copied=0.08, refused=0.08, slow=0, lagging=0.08, crash=0),
        members=3,
        named=False,
        promoter=False,
        seed=250,
    ),
    "a member whose part of the name was abandoned before its restart said that it had none": Scenario(
        saves=(
            Save(generation="step-1", step=1, writers=(0, 1), marker=0, gap=0.0, files=1),
            Save(generation="last", step=2, writers=(0, 1), marker=1, gap=5.0, files=1),
            Save(generation="last", step=3, writers=(0, 1), marker=1, gap=0.0, files=2),
            Save(generation="last", step=4, writers=(0, 1), marker=1, gap=20.0, files=2),
            Save(generation="last", step=5, writers=(0, 1), marker=1, gap=20.0, files=2),
            Save(generation="step-1", step=1, writers=(0, 1), marker=0, gap=20.0, files=2),
        ),
        events=(Event(at=30.0, what="node", node=0, seconds=90.0),),
        rates=Rates(lost=0.03, unheard=0.03, held=0.03, copied=0.03, refused=0.03, slow=0.03, lagging=0.03, crash=0.02),
        members=2,
        named=True,
        promoter=False,
        seed=2026,
    ),
    "a mount forgot at its restart that a save had been written again": Scenario(
        saves=(
            Save(generation="step-3", step=3, writers=(0, 1, 2), marker=0, gap=20.0, files=1),
            Save(generation="last", step=2, writers=(0, 1, 2), marker=2, gap=5.0, files=1),
            Save(generation="last", step=3, writers=(0, 1, 2), marker=1, gap=0.0, files=1),
            Save(generation="step-2", step=2, writers=(0, 1, 2), marker=2, gap=20.0, files=2),
        ),
        events=(
            Event(at=23.0, what="pause", node=1, seconds=3.0),
            Event(at=57.0, what="engine", node=0, seconds=20.0),
            Event(at=39.0, what="disk", node=0, seconds=3.0),
            Event(at=36.0, what="node", node=4, seconds=3.0),
            Event(at=59.0, what="clock", node=3, seconds=20.0),
        ),
        rates=Rates(lost=0, unheard=0.08, held=0, copied=0.08, refused=0, slow=0.08, lagging=0.08, crash=0),
        members=3,
        named=True,
        promoter=False,
        seed=63,
    ),
    "foreign records of a former owner stayed unfinished": Scenario(
        saves=(
            Save(generation="step-2", step=2, writers=(0, 1), marker=1, gap=20.0, files=1),
            Save(generation="last", step=2, writers=(0, 1), marker=0, gap=1.0, files=1),
            Save(generation="last", step=3, writers=(0, 1), marker=1, gap=5.0, files=1),
            Save(generation="last", step=4, writers=(0, 1), marker=0, gap=5.0, files=2),
            Save(generation="last", step=5, writers=(0, 1), marker=1, gap=0.0, files=1),
            Save(generation="last", step=6, writers=(0, 1), marker=1, gap=5.0, files=2),
        ),
        events=(
            Event(at=42.0, what="owner", node=1, seconds=3.0),
            Event(at=11.0, what="disk", node=4, seconds=3.0),
            Event(at=47.0, what="owner", node=4, seconds=20.0),
            Event(at=60.0, what="engine", node=1, seconds=3.0),
        ),
        rates=Rates(lost=0, unheard=0.01, held=0.01, copied=0.01, refused=0, slow=0.01, lagging=0, crash=0.01),
        members=2,
        named=True,
        promoter=False,
        seed=28,
    ),
    "a wish was taken for over while its attempt was still to be listed": Scenario(
        saves=(
            Save(generation="last", step=1, writers=(0, 1), marker=0, gap=0.0, files=2),
            Save(generation="step-1", step=1, writers=(0, 1), marker=0, gap=20.0, files=1),
        ),
        events=(Event(at=54.0, what="node", node=1, seconds=90.0),),
        rates=Rates(lost=0, unheard=0, held=0.08, copied=0.08, refused=0, slow=0, lagging=0.08, crash=0),
        members=2,
        named=True,
        promoter=True,
        seed=2036,
    ),
    "a disk is lost and the name written again": Scenario(
        saves=(
            Save(generation="step-2", step=2, writers=(0, 1, 2, 3), marker=2, gap=20.0, files=2),
            Save(generation="step-1", step=1, writers=(0, 1, 2, 3), marker=0, gap=20.0, files=2),
            Save(generation="step-4", step=4, writers=(2, 3), marker=0, gap=1.0, files=1),
            Save(generation="step-2", step=2, writers=(0, 1, 2, 3), marker=0, gap=0.0, files=1),
        ),
        events=(
            Event(at=20.677153197780672, what="cut", node=0, seconds=3.0),
            Event(at=18.389499866752825, what="owner", node=2, seconds=90.0),
            Event(at=1.0, what="engine", node=4, seconds=90.0),
            Event(at=30.0, what="disk", node=2, seconds=90.0),
            Event(at=0.0, what="engine", node=2, seconds=20.0),
        ),
        rates=Rates(lost=0.01, unheard=0.0, held=0.01, copied=0.0, refused=0.0, slow=0.01, lagging=0.08, crash=0.0),
        members=4,
        named=False,
        promoter=True,
        seed=1795375,
    ),
    "an owner changes while a name is written again": Scenario(
        saves=(
            Save(generation="step-1", step=1, writers=(0, 1), marker=0, gap=20.0, files=1),
            Save(generation="step-1", step=1, writers=(0, 1), marker=1, gap=5.0, files=2),
            Save(generation="step-1", step=1, writers=(0, 1), marker=0, gap=5.0, files=1),
            Save(generation="step-3", step=3, writers=(1,), marker=1, gap=20.0, files=2),
            Save(generation="step-3", step=3, writers=(1,), marker=0, gap=20.0, files=2),
            Save(generation="step-3", step=3, writers=(1,), marker=1, gap=20.0, files=1),
        ),
        events=(
            Event(at=1.869261505161433, what="cut", node=3, seconds=20.0),
            Event(at=15.0, what="engine", node=1, seconds=20.0),
            Event(at=58.79009377729852, what="pause", node=4, seconds=3.0),
            Event(at=22.848911019559587, what="pause", node=0, seconds=20.0),
            Event(at=15.0, what="owner", node=3, seconds=3.0),
        ),
        rates=Rates(lost=0.01, unheard=0.0, held=0.0, copied=0.01, refused=0.08, slow=0.01, lagging=0.03, crash=0.0),
        members=2,
        named=False,
        promoter=False,
        seed=94075,
    ),
    "a member is restarted while a name is written again": Scenario(
        saves=(
            Save(generation="step-3", step=3, writers=(0, 1, 2), marker=1, gap=1.0, files=2),
            Save(generation="last", step=2, writers=(1, 2), marker=2, gap=5.0, files=2),
            Save(generation="last", step=3, writers=(1, 2), marker=1, gap=5.0, files=2),
            Save(generation="last", step=4, writers=(1, 2), marker=2, gap=0.0, files=1),
            Save(generation="step-4", step=4, writers=(0, 1, 2), marker=1, gap=5.0, files=1),
            Save(generation="step-1", step=1, writers=(1, 2), marker=1, gap=5.0, files=1),
        ),
        events=(
            Event(at=23.734731446164254, what="engine", node=0, seconds=3.0),
            Event(at=47.320552497898206, what="node", node=0, seconds=3.0),
            Event(at=4.0884597478797574e-55, what="owner", node=4, seconds=20.0),
            Event(at=47.320552497898206, what="owner", node=4, seconds=20.0),
        ),
        rates=Rates(lost=0.01, unheard=0.0, held=0.01, copied=0.0, refused=0.03, slow=0.03, lagging=0.03, crash=0.0),
        members=3,
        named=False,
        promoter=True,
        seed=17613,
    ),
    "an owner dies before it has said why": Scenario(
        saves=(
            Save(generation="step-3", step=3, writers=(0, 1, 2), marker=0, gap=1.0, files=2),
            Save(generation="step-3", step=3, writers=(0, 1, 2), marker=1, gap=0.0, files=1),
        ),
        events=(),
        rates=Rates(lost=0.01, unheard=0.0, held=0.01, copied=0.0, refused=0.08, slow=0.0, lagging=0.03, crash=0.01),
        members=3,
        named=False,
        promoter=False,
        seed=1,
    ),
}

STILL_BAD: dict[str, Scenario] = {
    "an owner changes during the first save, and neither record ends": Scenario(
        saves=(
            Save(generation="step-1", step=1, writers=(1,), marker=1, gap=1.0, files=2),
            Save(generation="step-2", step=2, writers=(0, 1), marker=0, gap=5.0, files=2),
        ),
        events=(Event(at=0.0, what="owner", node=1, seconds=90.0),),
        rates=Rates(lost=0.0, unheard=0.0, held=0.0, copied=0.01, refused=0.01, slow=0.03, lagging=0.03, crash=0.0),
        members=2,
        named=False,
        promoter=False,
        seed=0,
    ),
}
"""Worlds that are not mended yet."""
