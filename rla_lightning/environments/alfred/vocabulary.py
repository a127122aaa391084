"""Every word that digests, short commands, thoughts and critiques of ALFRED's rooms can contain, for word-level tokenizers."""

from __future__ import annotations

from rla_lightning.environments.alfred.affordances import LAMP_TYPES, OBJECT_TYPES, RECEPTACLE_TYPES
from rla_lightning.environments.alfred.knowledge import CUT_WORDS, FILLER_WORDS, MIDDLE, SLOT_WORDS, STATE_WORDS
from rla_lightning.environments.alfred.planner import CRITIQUES, CUT_THOUGHT, THOUGHTS
from rla_lightning.environments.alfred.scene import KIND_WORDS, VERBS

KNOB_WORDS = ("receptacles", "distractors", "closed", "hidden", "copies")
MAX_COUNT = 60  # largest number of a description
MANY = frozenset({"cabinet", "drawer", "shelf"})  # types of which a room can have many
MAX_RECEPTACLES, MAX_MANY, MAX_OBJECTS = 6, 30, 6  # numbers of names that are one word; higher ones are unknown words


def alfred_vocabulary() -> tuple[str, ...]:
    """About 1,000 words: types, numbered names, verbs and the words of digests."""
    words = {*KIND_WORDS.values(), *OBJECT_TYPES, *LAMP_TYPES, *RECEPTACLE_TYPES, MIDDLE, *STATE_WORDS.values()}
    for kind in RECEPTACLE_TYPES:
        words |= {f"{kind}_{number}" for number in range(1, (MAX_MANY if kind in MANY else MAX_RECEPTACLES) + 1)}
    for kind in (*OBJECT_TYPES, *LAMP_TYPES):
        words |= {f"{kind}_{number}" for number in range(1, MAX_OBJECTS + 1)}
    words |= {*SLOT_WORDS, *FILLER_WORDS, *VERBS, *KNOB_WORDS, *THOUGHTS, *CRITIQUES, *CUT_WORDS, CUT_THOUGHT}
    words |= {f"n{number}" for number in range(MAX_COUNT + 1)}
    return tuple(sorted(words))
