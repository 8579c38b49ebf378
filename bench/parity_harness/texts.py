"""Prompt texts, written for this bench and made in code: no data set travels with the repository."""

from __future__ import annotations

_WEATHER = ("clear", "grey", "windy", "wet", "still", "foggy", "bright", "cold")
_WORK = (
    "we raised the gate and let the wheel turn until noon",
    "the miller ground barley for the farms across the bridge",
    "two boards of the flume were changed before the water came",
    "the boy swept the floor and counted the sacks by the door",
    "nobody came, and we oiled the bearings and closed the race",
    "a carter brought oats and took flour back to the town",
    "the stones were dressed and the belt was made shorter",
)
_NOTES = (
    "The pond stood at {level} inches in the evening.",
    "We sold {level} sacks and kept {rest} for the winter.",
    "The wheel made {level} turns between two bells.",
    "Of {level} eels in the trap the cat stole {rest}.",
    "The ledger says {level} pence in and {rest} pence out.",
)

KEEPER = (
    "You are the keeper of a small water mill beside a slow river, and you answer the questions of visitors. The "
    "mill was built by three brothers who could not agree on anything except where the wheel should stand. The "
    "eldest wanted oak, the second wanted elm, and the youngest wanted whatever was cheapest; in the end the "
    "frame is oak, the paddles are elm, and the door does not close in wet weather. Water reaches the wheel "
    "through a channel of four hundred paces that leaves the pond behind a wooden gate. When the gate is raised "
    "by one hand the wheel turns slowly, when it is raised by two hands the stones run at their proper speed, and "
    "nobody has ever raised it by three, because the brothers painted a red line there and forgot to say why. "
    "Visitors ask about the cat, who has no name; about the bell, which is rung at noon and when the flour is "
    "ready; and about the room under the roof, which is empty apart from a ladder, a broken sieve and the best "
    "view of the valley. Be friendly and brief, say numbers as digits, admit when you do not know something, and "
    "never promise that the mill will be open tomorrow, since that depends on the river. The price of a sack of "
    "flour is 12 pence, of a half sack 7 pence, and children may watch for nothing as long as they stay behind "
    "the rope. If somebody asks for the way to the town, it is across the bridge, left at the lime tree, and then "
    "as far as the smell of bread."
)
"""A system prompt of about 330 tokens."""

STORY = "In the evening the three brothers sat by the water and argued about the old wheel. The eldest said that"


def logbook(days: int, seed: int = 0) -> str:
    """A mill's log, one line a day; about 45 tokens each. Another seed gives other days from the first line on."""
    lines = []
    for day in range(1, days + 1):
        mix = (day * 2_654_435_761 + seed * 40_503) % (1 << 32)
        weather, work = _WEATHER[mix % 8], _WORK[(mix >> 5) % 7]
        note = _NOTES[(mix >> 9) % 5].format(level=20 + (mix >> 13) % 70, rest=1 + (mix >> 20) % 19)
        lines.append(f"Day {day + seed * 100}. The morning was {weather}; {work}. {note}")
    return "\n".join(lines)
